"""torch.compile has compiled a function again and again.

Example::

    model = torch.compile(model)
    for batch in batches:  # each of another length
        loss = model(batch)

Pattern: a function that was compiled again twice at least since gradscope began for one guard, whatever its number, and
not all in one step. A flag and a size that change once each make two versions more, and an optimizer's function is
compiled once for each parameter's shape: that is all. Once is how torch.compile finds out that a size changes: it then
compiles for any size. Where the same size fails again, it was told not to, or the code fixes that size, as layers of
one class do that have other widths. What is compiled for an evaluation too, or for inputs that need no gradient, is so
once, and does not count; nor does what is compiled for another class, as a method that several inherit, unless there
are as many as the limit allows.
Evidence: how often, what that took, and the last reason, as Dynamo gives it.
Estimate: none. Once everything has been compiled nothing of it is left, and steps that compile do not count unless
most of them do; at the limit (``torch._dynamo.config.recompile_limit``) the function runs uncompiled from then on.

Source: PyTorch, "Recompilation" and "Dynamic Shapes" (torch.compiler documentation).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.compiled import facts_of, is_at_limit, versions_of
from gradscope.diagnose.findings import make_finding, script_of, several
from gradscope.ops import OF_TORCH
from gradscope.tables import Finding
from gradscope.units import ns as time_text

_FEWEST = 2  # for one guard: a flag that changes once, and then a size, are two versions, and that is all
_SIZES = re.compile(r"size mismatch|stride mismatch|rank mismatch")
_ONE_SIZE = re.compile(r"tensor '(.+)' size mismatch at index (\d+)")
_MODES = re.compile(r"GLOBAL_STATE changed|requires_grad mismatch|\.training\b|grad_mode")
_CLASSES = re.compile(r"___check_type_id\(")
_NUMBER = re.compile(r", \d{9,}\)")  # of a class or an object: another one in each run
_ANY_NUMBER = re.compile(r"\d+")
_BRANCHED = re.compile(r"\.(?:size\(\)|shape)\[")  # on a size that is not fixed
_LONGEST = 160  # characters of a reason


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each function."""
    functions: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in facts_of(case).get("again", ()):
        functions[each["place"], each["function"]].append(each)
    for (place, function), again in functions.items():
        found = [each for each in again if not _MODES.search(each["reason"])]
        versions = versions_of(case)[place, function]
        stops = is_at_limit(case, versions)
        counted = [each for each in found if stops or not _CLASSES.search(each["reason"])]
        steps = {each.get("step", number) for number, each in enumerate(counted)}
        alike = Counter(_kind(each["reason"]) for each in counted)
        if len(counted) >= _FEWEST and (stops or (max(alike.values()) >= _FEWEST and len(steps) > 1)):
            yield _finding(case, place, function, found, versions)


def _kind(reason: str) -> str:
    """What is the same of guards that fail for other numbers, or for other sizes."""
    return "sizes" if _SIZES.search(reason) else _ANY_NUMBER.sub("", reason)


def _finding(case: Case, place: str, function: str, found: Sequence[Mapping[str, Any]], versions: int) -> Finding:
    reason = _NUMBER.sub(")", next((each["reason"] for each in reversed(found) if each["reason"]), ""))
    took = round(sum(each["seconds"] for each in found) * 1e9)
    evidence = f"compiled again {several(len(found), 'time')} since profiling began, {time_text(took)} in all"
    stops = is_at_limit(case, versions)
    if stops:
        limit = facts_of(case)["limit"]
        evidence += f"; at {limit} versions (recompile_limit) torch.compile stops, and runs it uncompiled from then on"
    advice, code = _cure(reason, function, found, 2 * versions if stops else 0, script_of(case))
    return make_finding(
        RULE.name,
        case,
        None,
        severity="warning",
        layers=(),
        line=place or None,
        message=f"torch.compile compiles {function}{f' ({place})' if place else ''} again and again",
        evidence=f"{evidence}; the last time because of {reason[:_LONGEST]}" if reason else evidence,
        advice=advice,
        code=code,
    )


def _cure(reason: str, function: str, found: Sequence[Mapping[str, Any]], more: int, script: str) -> tuple[str, str]:
    """What to do about it, and code for that."""
    look = f"TORCH_LOGS=recompiles python {script}"
    if _SIZES.search(reason):
        sizes = Counter(match.groups() for each in found if (match := _ONE_SIZE.search(each["reason"])))
        if max(sizes.values(), default=0) > 1 and more:
            return (
                "Leave dynamic=False out, or allow as many versions as there are sizes where the code fixes them, "
                "as a layer's width.",
                f"torch._dynamo.config.recompile_limit = {more}",
            )
        if max(sizes.values(), default=0) > 1:
            return (
                "Leave dynamic=False out where it was given; layers of other widths are compiled once each, "
                "and that is all.",
                look,
            )
        called = "model" if function in {"forward", OF_TORCH} else function
        advice = "Compile it for sizes that change, or pad the batches to a few sizes."
        return advice, f"{called} = torch.compile({called}, dynamic=True)"
    if _BRANCHED.search(reason):
        return "Pad the batches to a few sizes: the function does something else from size to size.", look
    return "Keep what changes from call to call out of the compiled code, or pass it as a tensor.", look


RULE = Rule("recompiles", "functions that torch.compile compiles again and again", find)
