"""torch.compile could not compile a line, so that the code in front of it and behind it are graphs of their own.

Example::

    scale = x.abs().mean().item()  # a number that Python needs: the graph ends here
    return x / scale

Pattern: the breaks that Dynamo has noted since gradscope began, but for those that gradscope's own entry into backward
makes, where torch's own breaks the graph too, and those inside of torch.
Evidence: the reason as Dynamo gives it, and what is around the kernels of compiled code in a step: the look for a graph
that fits, its guards, and the code that enters it. Each region that a break makes has its own; where a step enters one
alone nothing in it is broken.
Estimate: none. What is fused across the line is known only once it compiles.

Source: PyTorch, "Working with Graph Breaks" (torch.compiler documentation).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from gradscope.diagnose.case import Case, Rule, first, share
from gradscope.diagnose.compiled import facts_of
from gradscope.diagnose.findings import is_of_a_library, make_finding, of_step, several
from gradscope.tables import Finding

# Rows that torch writes around what compiled code runs, by how their names begin.
_AROUND = ("TorchDynamo Cache Lookup", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper")
_REGION = "Torch-Compiled Region"
_SEVERAL = 2  # of regions: in front of a break and behind it
_WARNED = 0.02  # of the step, from which on it is more than a remark
_LONGEST = 160  # characters of a reason
_IN_WORDS = {"generic_jump": "a branch that depends on a tensor's value"}  # by how torch's own words begin


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each reason, which names the first of its lines."""
    lines: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in facts_of(case).get("breaks", ()):
        lines[each["reason"]][each["place"]] += 1
    around = sum(row.self_ns for row in case.run.ops if row.name.startswith(_AROUND))
    regions = round(sum(row.calls for row in case.run.ops if row.name.startswith(_REGION)))
    if regions < _SEVERAL:  # what broke is not in the step
        around = 0
    every = sum(map(len, lines.values()))
    for reason, counted in lines.items():
        places = list(counted)
        in_library = is_of_a_library(places[0])
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning" if share(around, case) >= _WARNED else "info",
            layers=(),
            line=places[0],
            message=f"torch.compile breaks the graph at {first(places, 1)}",
            evidence=_evidence(case, reason, counted, around, regions),
            advice=(
                "It is in an installed package: compile the blocks around it, each by itself."
                if in_library
                else "Take it out of the compiled code, or write it in tensor operations; torch explains each break."
            ),
            code="TORCH_LOGS=graph_breaks python train.py",
            cost_ns=around * len(places) // every,
        )


def _evidence(case: Case, reason: str, counted: Mapping[str, int], around: int, regions: int) -> str:
    places = list(counted)
    words = next((text for begin, text in _IN_WORDS.items() if reason.startswith(begin)), "")
    parts = [f"{words} ({reason[:_LONGEST]})" if words else reason[:_LONGEST]]
    parts.append(f"{several(sum(counted.values()), 'break')} since profiling began")
    if len(places) > 1:
        parts.append(f"also at {first(places[1:])}")
    if around:
        parts.append(
            f"a step enters {several(regions, 'compiled region')}: what is around the kernels of all of them takes "
            f"{of_step(around, case)}"
        )
    return "; ".join(parts)


RULE = Rule("graph-break", "lines at which torch.compile breaks the graph", find)
