"""One of several identical blocks is slower than the others.

Example::

    self.blocks = nn.ModuleList(Block(width) for _ in range(6))
    self.blocks[3].register_forward_pre_hook(log_statistics)  # left there

Pattern: three or more layers of the same class and number of parameters whose paths differ in one number. One is slow
where it runs operations that none of the others does, or more calls of one, and these take 0.3 times what a block
usually takes. Or the median over the steps of its ratio to the others is 1.3 and more, farther from them than three
times their own range, over at least four measured steps. Both by what the block takes in the usual step: a step that
the system interrupted is no reason.

Evidence: its time, the median of the others, and the operation that makes most of the difference. Estimate: 0.8 of the
time of what it does more (half to 0.95): what it is there for may have to be done in another way.

Source: the outlier rule is that of J. Tukey, Exploratory Data Analysis (1977), with a wide fence
(``gradscope/tables/siblings.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from gradscope.diagnose.case import Case, Rule, layer_code
from gradscope.diagnose.findings import make_finding, parts_of
from gradscope.tables import Finding, LayerRow
from gradscope.tables.siblings import outside_ratio, typical_excess_ns
from gradscope.units import calls as calls_text
from gradscope.units import ns as time_text
from gradscope.units import ratio as ratio_text

_FEWEST, _FACTOR = 3, 1.3
_STEPS = 4  # fewer may all have been interrupted at the same place
_LEAST_SHARE, _LEAST_NS = 0.01, 100_000
_OF_MORE = (0.5, 0.8, 0.95)  # of what it does more: low, likely, high
_PART = 0.3  # of a usual block that it must cost; of the difference that one operation must make
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# layer below the block, phase, operation
_Op = tuple[str, str, str]


@dataclass(frozen=True)
class _Block:
    row: LayerRow
    total_ns: int
    steps_ns: tuple[int, ...]  # forward and backward of each measured step, the layers below included
    ops: dict[_Op, tuple[int, float]]  # ns and calls


@dataclass(frozen=True)
class _Cause:
    op: _Op
    ns: int  # more than in the others
    calls: float
    kind: str  # "new", "more" or "dear"


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each slow block; not for the layers below it."""
    groups: defaultdict[tuple[str, str, int], list[LayerRow]] = defaultdict(list)
    for row in case.layers.values():
        for number in _NUMBER.finditer(row.path):
            folded = f"{row.path[: number.start()]}*{row.path[number.end() :]}"
            parameters = sum(each.parameters for each in case.below[row.path])
            groups[folded, row.class_name, parameters].append(row)
    told: set[str] = set()
    for _, rows in sorted(groups.items(), key=lambda item: item[0][0].count(".")):
        if len(rows) < _FEWEST or any(each.path in told for row in rows for each in _above(case, row)):
            continue
        finding = _slow_one(case, [_block(case, row) for row in rows])
        if finding is not None:
            told.add(finding.layers[0])
            yield finding


def _above(case: Case, row: LayerRow) -> Iterator[LayerRow]:
    """The layer and those that it lies in."""
    above: LayerRow | None = row
    while above is not None:
        yield above
        above = None if above.parent is None else case.layers.get(above.parent)


def _block(case: Case, row: LayerRow) -> _Block:
    ops: dict[_Op, tuple[int, float]] = {}
    steps: list[tuple[int, ...]] = []
    for each in case.below[row.path]:
        below = each.path[len(row.path) :].lstrip(".")
        steps.append(tuple(each.backward_self_steps_ns))
        steps.append(tuple(each.forward_self_steps_ns))
        for phase in ("forward", "backward", "recompute"):
            for op in case.ops.get((each.path, phase), ()):
                ops[below, phase, op.name] = (op.self_ns, op.calls)
    sums = tuple(sum(column) for column in zip(*filter(None, steps), strict=False))
    return _Block(row, row.forward_total_ns + row.backward_total_ns, sums, ops)


def _slow_one(case: Case, blocks: list[_Block]) -> Finding | None:
    blocks = sorted(blocks, key=lambda block: median(block.steps_ns) if block.steps_ns else block.total_ns)
    least = max(_LEAST_NS, _LEAST_SHARE * case.step_ns, _PART * median(block.total_ns for block in blocks))
    if len({block.row.calls for block in blocks}) > 1:
        return None  # called more often, as experts are: the model says so
    extra = _extra(blocks)
    spent, path = max(((sum(each.ns for each in causes), path) for path, causes in extra.items()), default=(0, ""))
    if spent >= least and all(sum(each.ns for each in extra[other]) < least for other in extra if other != path):
        slow = next(block for block in blocks if block.row.path == path)
        others = [block for block in blocks if block is not slow]
        spent = min(spent, _excess_ns(slow, others))
        return _finding(case, slow, others, extra[path][0], spent) if spent >= least else None
    slow, others = blocks[-1], blocks[:-1]
    if len(slow.steps_ns) < _STEPS or outside_ratio(slow.steps_ns, _steps(others), _FACTOR) is None:
        return None
    excess, cause = _excess_ns(slow, others), _dearer(slow, others)
    if excess < least or cause is None or cause.ns < _PART * excess:
        return None
    return _finding(case, slow, others, cause, min(cause.ns, excess))


def _steps(blocks: list[_Block]) -> list[tuple[int, ...]]:
    return [block.steps_ns for block in blocks]


def _excess_ns(slow: _Block, others: list[_Block]) -> int:
    """Return what the block takes more than the others in the usual step."""
    found = typical_excess_ns(slow.steps_ns, _steps(others))
    return round(slow.total_ns - median(block.total_ns for block in others)) if found is None else found


def _finding(case: Case, slow: _Block, others: list[_Block], cause: _Cause, saving: int) -> Finding:
    path = slow.row.path
    total, usual = (
        (median(slow.steps_ns), median(median(block.steps_ns) for block in others))
        if all(block.steps_ns for block in (slow, *others))
        else (slow.total_ns, median(block.total_ns for block in others))
    )
    below, phase, name = cause.op
    what = "Python code, such as a hook" if name == "(python)" else name
    more = {
        "new": "which none of the others runs",
        "more": "which the others call less often",
        "dear": "which is faster",
    }
    shown = [layer_code(case, path), layer_code(case, others[0].row.path)]
    where = f"{name} in {phase}" + (f" of {path}.{below}" if below else "")
    return make_finding(
        RULE.name,
        case,
        parts_of(saving, _OF_MORE),
        layers=(path,),
        line=slow.row.source,
        message=(
            f"{path} is slower than the {len(others)} other blocks like it because of {what}, {more[cause.kind]}"
            + (" in the others" if cause.kind == "dear" else "")
        ),
        evidence=(
            f"{time_text(round(total))} per step compared with a median of {time_text(round(usual))}, "
            f"{ratio_text(total / max(usual, 1))}; {where} takes {time_text(cause.ns)} more, "
            f"{calls_text(cause.calls)} call{'' if cause.calls == 1 else 's'}"
        ),
        cost_ns=saving,
        advice=f"Find out how {path} differs from the others: a setting, a dtype, a hook or a different input.",
        code=f"print({', '.join(shown)})" if all(shown) else "",
    )


def _extra(blocks: list[_Block]) -> dict[str, list[_Cause]]:
    """Return by block's path the operations that the others run less often or not, the dearest first."""
    found: defaultdict[str, list[_Cause]] = defaultdict(list)
    for op in {op for block in blocks for op in block.ops if op[2] != "(python)"}:
        known = [block.ops.get(op, (0, 0.0)) for block in blocks]
        calls = sorted((count for _, count in known), reverse=True)
        if calls[0] == calls[1]:  # as often in another
            continue
        at = next(i for i, (_, count) in enumerate(known) if count == calls[0])
        before = median(ns for i, (ns, _) in enumerate(known) if i != at)
        cause = _Cause(op, round(known[at][0] - before), calls[0], "more" if calls[1] else "new")
        found[blocks[at].row.path].append(cause)
    return {path: sorted(causes, key=lambda each: each.ns, reverse=True) for path, causes in found.items()}


def _dearer(slow: _Block, others: list[_Block]) -> _Cause | None:
    """The operation whose time differs most."""
    found = [
        _Cause(op, round(ns - median(block.ops.get(op, (0, 0.0))[0] for block in others)), calls, "dear")
        for op, (ns, calls) in slow.ops.items()
    ]
    return max(found, key=lambda each: each.ns, default=None)


RULE = Rule("slow-repeat", "one of several identical blocks that is slower than the others", find, of_times=True)
