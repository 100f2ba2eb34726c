"""torch.compile could not compile a line, so that the code in front of it and behind it are graphs of their own.

Example::

    scale = x.abs().mean().item()  # a number that Python needs: the graph ends here
    return x / scale

Pattern: the breaks that Dynamo has noted since gradscope began, but for those that gradscope's own entry into backward
makes, where torch's own breaks the graph too, and those inside of torch.
Evidence: the reason as Dynamo gives it, and what is around the kernels of compiled code in a step: the look for a graph
that fits, its guards, and the code that enters it. Each region has its own; a break costs what is around those that
begin behind it, a part of all by how often they are entered. Where a step enters none of them the break is not in the
step, or it is in a loop: nothing of the function is compiled then but what it calls, and what that costs is not told.
Estimate: none. What is fused across the line is known only once it compiles.

Source: PyTorch, "Working with Graph Breaks" (torch.compiler documentation).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradscope.diagnose.case import Case, Rule, first, share
from gradscope.diagnose.compiled import facts_of
from gradscope.diagnose.findings import is_of_a_library, make_finding, of_package, of_step, script_of, several
from gradscope.ops import CACHE_LOOKUP, COMPILED_REGION
from gradscope.tables import Finding

# Rows that torch writes around what compiled code runs, by how their names begin.
_AROUND = (CACHE_LOOKUP, COMPILED_REGION, "Pregraph bytecode", "AOTDispatcher Runtime Wrapper")
_REGION = f"{COMPILED_REGION}: "
_WARNED = 0.02  # of the step, from which on it is more than a remark
_LONGEST = 160  # characters of a reason
# By how torch's own words begin.
_JUMP, _BRANCH = "generic_jump", "Data-dependent branching"
_LOGS = "logging.Logger method not supported"
_LOGGED = re.compile(r"\.(?P<name>debug|info|warning|error|exception|critical|log)\(")
_IN_WORDS = {
    _JUMP: "a branch that depends on a tensor's value",
    "step_unsupported": "the function cannot be resumed behind this line, for a reason that torch tells in its own log "
    "alone: the rest of it is not compiled; functions that it calls are, each by itself, but for torch's own",
}


# What torch itself can capture, if it is told to, by how its words begin.
_CAPTURED = {
    "Dynamic shape operator": "capture_dynamic_output_shape_ops",
    "Unsupported Tensor.item() call": "capture_scalar_outputs",
}


@dataclass
class _Reason:
    """What was noted of the breaks that torch gives one reason for."""

    lines: Counter[str] = field(default_factory=Counter)
    frames: set[str] = field(default_factory=set)  # that begin behind them
    inside: str = ""  # the line of a library's that the first of them is in


class _Regions(NamedTuple):
    """The compiled regions that a step enters."""

    every: float
    behind: float  # those that begin behind one of the breaks
    ns: int  # what is around the kernels of these
    shared: bool  # with other findings


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each reason, and functions left as they are for it, which names the first of its lines."""
    reasons: defaultdict[tuple[str, tuple[str, ...]], _Reason] = defaultdict(_Reason)
    breaks = _told_once(facts_of(case).get("breaks", ()))
    left: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)  # a loop, and one that calls it in a loop
    for each in breaks:
        if each.get("skipped", ""):
            left[each["reason"], each["place"]][each["skipped"]] = None
    for each in breaks:
        noted = reasons[each["reason"], tuple(left.get((each["reason"], each["place"]), ()))]
        if not noted.lines:  # of the line that the finding names
            noted.inside = each.get("inside", "")
        noted.lines[each["place"]] += 1
        noted.frames.update(each.get("frames", ()))
    around = sum(row.self_ns for row in case.run.ops if row.name.startswith(_AROUND))
    entered = _entered(case)
    every = sum(entered.values())
    sharing = Counter(frame for noted in reasons.values() for frame in noted.frames)
    for (reason, skipped), noted in reasons.items():
        behind = noted.frames & set(entered)
        part = sum(entered[frame] / sharing[frame] for frame in behind) / (every or 1)
        shared = any(sharing[frame] > 1 for frame in behind)
        regions = _Regions(every, sum(entered[frame] for frame in behind), round(around * part), shared)
        places = list(noted.lines)
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning" if share(regions.ns, case) >= _WARNED else "info",
            layers=(),
            line=places[0],
            message=f"torch.compile breaks the graph at {first([of_package(place) for place in places], 1)}",
            evidence="; ".join(_evidence(case, reason, noted, regions, skipped=skipped)),
            **_cure(case, reason, places[0]),
            cost_ns=regions.ns,
        )


def _told_once(breaks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same breaks: a branch for which torch has another name too by what it says of that line elsewhere."""
    said = {each["place"]: each["reason"] for each in breaks if each["reason"].startswith(_BRANCH)}
    return [
        {**each, "reason": said.get(each["place"], each["reason"])} if each["reason"].startswith(_JUMP) else each
        for each in breaks
    ]


def _cure(case: Case, reason: str, place: str) -> dict[str, str]:
    """What to do about it, and code for that."""
    setting = next((name for begin, name in _CAPTURED.items() if reason.startswith(begin)), "")
    if setting:
        advice = (
            "Have torch capture it, with sizes that it finds out while it runs; or take it out of the compiled code."
        )
        return {"advice": advice, "code": f"torch._dynamo.config.{setting} = True"}
    if reason.startswith(_LOGS):
        texts = (each.get("text", "") for each in facts_of(case).get("breaks", ()) if each["place"] == place)
        called = next(filter(None, map(_LOGGED.search, texts)), None)
        name = "warning" if called is None else called["name"]
        return {
            "advice": "Have torch leave the call out of what it compiles, if nobody reads it; or log where nothing is "
            "compiled.",
            "code": f"torch._dynamo.config.ignore_logging_functions.add(logging.Logger.{name})"
            + "  # which the line calls" * (called is None),
        }
    advice = (
        "It is in an installed package: compile the blocks around it, each by itself."
        if is_of_a_library(place)
        else "Take it out of the compiled code, or write it in tensor operations; torch explains each break."
    )
    return {"advice": advice, "code": f"TORCH_LOGS=graph_breaks python {script_of(case)}"}


def _entered(case: Case) -> Mapping[str, float]:
    """How often a step enters compiled regions, by torch's number of the frame: "3" of "3/1", its second version."""
    entered: defaultdict[str, float] = defaultdict(float)
    for row in case.run.ops:
        if row.name.startswith(_REGION):
            entered[row.name.removeprefix(_REGION).rpartition("/")[0]] += row.calls
    return entered


def _evidence(case: Case, reason: str, noted: _Reason, regions: _Regions, *, skipped: Sequence[str]) -> Iterator[str]:
    places = list(noted.lines)
    words = next((text for begin, text in _IN_WORDS.items() if reason.startswith(begin)), "")
    if words:  # torch's own behind them, where it is more than a name
        yield f"{words} ({reason[:_LONGEST]})" if " " in reason else words
    else:
        yield reason[:_LONGEST]
    if noted.inside:
        # Torch's own functions are compiled as a part of what calls them alone.
        yield f"in {noted.inside}, which this line calls{', uncompiled' if noted.inside.startswith('torch/') else ''}"
    yield f"{several(sum(noted.lines.values()), 'break')} since profiling began"
    if len(places) > 1:
        yield f"also at {first(places[1:])}"
    if skipped:
        which, who = ("is", "it calls") if len(skipped) == 1 else ("are", "they call")
        rest = "each by itself, but for torch's own"
        yield f"{' and '.join(skipped)} {which} not compiled; functions that {who} are, {rest}"
    if regions.ns:
        every = several(max(round(regions.every), 1), "compiled region")
        whose = "that one's" if round(regions.behind) == 1 else "their"
        behind = f"{'' if regions.behind == round(regions.behind) else 'on average '}{regions.behind:.2g}"
        yield (
            f"a step enters {every}, {behind} of them behind it: what is around {whose} kernels takes "
            f"{of_step(regions.ns, case)}{', its part beside other findings' if regions.shared else ''}"
        )


RULE = Rule("graph-break", "lines at which torch.compile breaks the graph", find)
