"""Runs the rules."""

from __future__ import annotations

from collections.abc import Collection

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.rules import RULES
from gradscope.diagnose.worth import weighed
from gradscope.errors import UsageError
from gradscope.tables import Finding


def diagnose(case: Case, ignore: Collection[str] = (), *, steady: bool = True) -> tuple[list[Finding], list[str]]:
    """Return what the rules find, the largest saving first; and a note for each rule that failed.

    Every finding is weighed, see :func:`gradscope.diagnose.worth.weighed`: rules only say what they saw.

    Args:
        ignore: names of rules that are left out.
        steady: False where the steps of the run differ so much that none of its times can be relied on: then no
            saving of time is promised, and rules that rest on times alone are left out.

    Raises:
        UsageError: ``ignore`` names a rule that there is not.
    """
    require_known(ignore)
    found: list[Finding] = []
    notes: list[str] = []
    for rule in RULES.values():
        if rule.name in ignore or (rule.of_times and not steady):
            continue
        try:
            weighty = [weighed(each, rule, case, steady=steady) for each in rule.find(case)]
            found += [each for each in weighty if each is not None]
        except Exception as error:  # a defect of one rule must not cost the user the report
            notes.append(f"rule {rule.name} failed, so it reports nothing: {type(error).__name__}: {error}")
    return sorted(found, key=_weight, reverse=True), notes


def require_known(names: Collection[str]) -> None:
    """Raise :class:`UsageError` unless each is the name of a rule."""
    unknown = sorted(set(names) - set(RULES))
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; gradscope rules lists them.")


def every_rule() -> list[Rule]:
    """Return all rules, in the order of their names."""
    return [RULES[name] for name in sorted(RULES)]


_SEVERITIES = {"critical": 2, "warning": 1, "info": 0}


def _weight(finding: Finding) -> tuple[int, int, int]:
    return finding.predicted_saving_ns or 0, finding.predicted_saving_bytes or 0, _SEVERITIES[finding.severity]
