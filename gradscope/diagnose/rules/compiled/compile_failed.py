"""torch.compile failed to compile a function, and the program goes on with it as it was written.

Example::

    torch._dynamo.config.suppress_errors = True  # an error while it compiles is a line in the log

Pattern: functions of which Dynamo has noted that their backend, or Dynamo itself, raised; not those that are left as
they are for a break, or for the number of their versions.
Evidence: the error as torch tells it.
Estimate: none. What compiled code would take is known only once it compiles.

Source: torch/_dynamo/config.py (``suppress_errors``), convert_frame.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.compiled import facts_of
from gradscope.diagnose.findings import make_finding, several
from gradscope.tables import Finding

_LONGEST = 200  # characters of an error


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each function."""
    functions: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for each in facts_of(case).get("failed", ()):
        functions[each["function"], each["place"]].append(each["reason"])
    for (function, place), reasons in functions.items():
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning",
            layers=(),
            line=place or None,
            message=f"torch.compile fails on {function}{f' ({place})' if place else ''}, which runs as it was written",
            evidence=f"{several(len(reasons), 'time')} since profiling began: {reasons[-1][:_LONGEST]}",
            advice="Have the error raised to see all of it, and mend it, or leave torch.compile out there.",
            code="torch._dynamo.config.suppress_errors = False",
        )


RULE = Rule("compile-failed", "functions that torch.compile fails on, so that they run as written", find)
