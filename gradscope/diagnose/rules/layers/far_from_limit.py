"""A layer takes several times as long as its matmuls or memory traffic would at this machine's limits.

Example::

    for head in range(64):  # 64 matmuls of narrow matrices, where one of wide ones is enough
        out.append(q[:, head] @ k[:, head].transpose(-2, -1))

Pattern: a layer, with its repeats, of a tenth of the step or more, whose matmuls or bytes should limit it (its calls
do not explain the time, a GPU was not idle), and that still takes more than three times its limit. Layers where a
recipe could be put in are left out: that says more. On the CPU another kind of layer must have come three times nearer
to its limit in the same run: else the machine was busy with something else. Evidence: both times, forward and backward,
against the limits that ``gradscope doctor --calibrate`` measured. Estimate: none; the difference is the most that there
is to gain, and shapes or functions that cost more than a matmul of large matrices or a plain copy keep a part of it.

Source: S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gradscope.diagnose.bounds import bounded, call_bytes, calls_of_layers
from gradscope.diagnose.case import Case, Rule, first, layer_code, share
from gradscope.diagnose.findings import at_most, make_finding
from gradscope.diagnose.worth import is_slowed_down, own_ns
from gradscope.ops import ATEN
from gradscope.tables import Finding, LayerRow, OpRow, Severity
from gradscope.units import calls as calls_text
from gradscope.units import ns as time_text
from gradscope.units import percent

_WEIGHT = 0.10  # of the step
_TIMES = 3.0  # the limit
_WARNING = 0.30  # of the step, between the time and the limit
_WITNESS = 0.03  # of the step: such a layer, near its limit, shows what the machine was free for

# Times of a run that the profiler slowed down this much say nothing about limits.
_DISTURBED = 1.5

_ADVICE = {
    "compute": (
        "Use fewer, larger matmuls: a larger batch, sizes that are multiples of 64, no loop over small matrices."
    ),
    "bandwidth": "Make fewer passes over its tensors: torch.compile fuses adjacent operations.",
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each kind of layer that is far from its limit."""
    if case.limits is None or is_slowed_down(case):
        return
    if (case.run.step.overhead or 1.0) > _DISTURBED:
        return
    explained = _explained(case)
    groups: defaultdict[tuple[str, str, str], list[LayerRow]] = defaultdict(list)
    known = any(row.bound_by is not None for row in case.run.layers)
    for row in case.run.layers if known else bounded(case):
        if row.bound_by in _ADVICE and row.path not in explained:
            groups[_kind(row.path), row.class_name, str(row.bound_by)].append(row)
    times = {kind: (sum(map(own_ns, rows)), sum(map(_limit, rows))) for kind, rows in groups.items()}
    usual = 1.0 if case.on_cuda else _usual(case, times.values())
    if usual > _TIMES:
        return
    for kind, (spent, limit) in times.items():
        if share(spent, case) >= _WEIGHT and spent > _TIMES * usual * limit > 0:
            yield _finding(case, groups[kind], kind[2], spent, limit)


def _usual(case: Case, times: Iterable[tuple[int, int]]) -> float:
    """How many times its limit the layer takes that comes nearest: what else the machine did slowed that one too."""
    near = (spent / limit for spent, limit in times if limit and share(spent, case) >= _WITNESS)
    return max(min(near, default=math.inf), 1.0)


def _finding(case: Case, rows: Sequence[LayerRow], bound: str, spent: int, limit: int) -> Finding:
    names = [row.path or row.class_name for row in rows]
    forward, backward = sum(row.forward_self_ns for row in rows), sum(row.backward_self_ns for row in rows)
    forward_limit = sum(row.forward_limit_ns or 0 for row in rows)
    backward_limit = sum(row.backward_limit_ns or 0 for row in rows)
    evidence = (
        f"{first(names)}: {percent(share(spent, case))} of the step; forward {time_text(forward)} "
        f"(limit {time_text(forward_limit)}), backward {time_text(backward)} (limit "
        f"{time_text(backward_limit)}), counting only {_LIMITS[bound]}"
    )
    dearest = _dearest(case, rows)
    if dearest is not None:
        evidence += f"; most expensive: {dearest[0]}, {calls_text(dearest[1])} calls, {time_text(dearest[2])}"
    severity: Severity = "warning" if share(spent - limit, case) >= _WARNING else "info"
    return make_finding(
        RULE.name,
        case,
        at_most(spent - limit),
        severity=severity,
        layers=(row.path for row in rows),
        line=_line(case, rows),
        message=(
            f"Forward and backward take {time_text(spent)}; at this machine's limit they would take {time_text(limit)}"
        ),
        evidence=evidence,
        advice=_ADVICE[bound],
        code=_code(case, rows[0], bound),
        cost_ns=spent,
    )


_LIMITS = {"compute": "its matmuls", "bandwidth": "its memory traffic"}


def _code(case: Case, row: LayerRow, bound: str) -> str:
    if bound == "compute":
        return ""
    model = layer_code(case, row.path) if row.path else "model"
    return f"{model}.compile()" if model else ""


def _line(case: Case, rows: Sequence[LayerRow]) -> str | None:
    """Return where these layers move most."""
    calls = calls_of_layers(case)
    moved: defaultdict[str, int] = defaultdict(int)
    for call in (call for row in rows for call in calls.get(row.path, ())):
        if call.source is not None:
            moved[call.source] += sum(call_bytes(call))
    return max(moved, key=lambda source: moved[source], default=None)


def _limit(row: LayerRow) -> int:
    return (row.forward_limit_ns or 0) + (row.backward_limit_ns or 0)


def _kind(path: str) -> str:
    """Return what is equal for repeats: "h.0.mlp" and "h.11.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", path)


def _explained(case: Case) -> set[str | None]:
    """Return the layers where a recipe could be put in, and those that make the calls that would go."""
    found: set[str | None] = set()
    for place in case.facts.places:
        if place.supported and not place.idle:
            found.add(place.layer)
            found |= {case.call(index).layer for index in place.calls}
    return found


def _dearest(case: Case, rows: Sequence[LayerRow]) -> tuple[str, float, int] | None:
    """Name, calls and time of the operation on which these layers spend most."""
    calls: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, int] = defaultdict(int)
    for op in _ops(case, rows):
        calls[op.name] += op.calls
        spent[op.name] += op.self_ns
    name = max(spent, key=lambda each: spent[each], default=None)
    return None if name is None else (name, calls[name], spent[name])


def _ops(case: Case, rows: Sequence[LayerRow]) -> Iterator[OpRow]:
    for row in rows:
        for phase in ("forward", "backward"):
            yield from (op for op in case.ops.get((row.path, phase), ()) if op.name.startswith(ATEN))


RULE = Rule("far-from-limit", "layers far slower than this machine's limits", find, of_times=True)
