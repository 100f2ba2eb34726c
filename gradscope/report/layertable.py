"""The tree of layers as a table: the centre of the terminal's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gradscope import units
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line
from gradscope.report.layer_cost import Amounts, add_up
from gradscope.report.style import heading, heat
from gradscope.report.tree import SAVED_MEMORY, Tree, TreeRow
from gradscope.report.view import View

# Smallest and largest widths: a bar must be wide enough to compare, a name wide enough to recognise.
_BAR = (10, 24)
_NAME = (32, 56)
_LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class _Field:
    """One column of numbers."""

    header: str
    drop: int  # order of dropping when it gets narrow, see Column
    text: Callable[[Amounts, Amounts], str]  # of a layer's own amounts, and of those with all below it
    align: Literal["left", "right"] = "right"


def layer_lines(view: View, width: int, marks: Glyphs) -> list[Line]:
    """The section "Layers": heading, tree, what is hidden, and what no layer accounts for."""
    tree = view.tree
    if not tree.rows:
        return []
    fields = _fields(tree, view.scale)
    main, others = fields[0], fields[1:]
    grid = Grid(
        [
            Column("layer", "left", least=_NAME[0], most=_NAME[1]),
            Column("class", "left", drop=6, least=9, most=22),
            Column(marks.text(main.header)),
            Column("share"),
            Column("", "left", drop=3, least=_BAR[0], most=_BAR[1]),
            *(Column(marks.text(field.header), field.align, drop=field.drop) for field in others),
            Column("calls", drop=8),
        ]
    )
    for row in tree.rows:
        _layer_row(grid, row, fields, marks)
    for hidden in tree.hidden:
        numbers = [field.text(hidden.own, hidden.own) for field in fields]
        _dim_row(grid, hidden.text, hidden.share, numbers, marks)
    if tree.rest > 0:
        rest = units.size(tree.rest) if tree.metric == SAVED_MEMORY else view.scale.text(tree.rest)
        _dim_row(grid, "outside the layers", tree.rest_share, [rest] + [""] * len(others), marks)
    about = f"{_SHARE[tree.metric]}: {marks.own} the layer itself, {marks.below} layers below it"
    table = grid.lines(width, marks)
    # Where the terminal is too narrow for both, the heading above says what the limit is.
    meaning = f"; limit: {tree.metric} at this machine's limits"
    if _LIMIT in (text for text, _ in table[0]) and len("Layers  ") + len(about) + len(meaning) <= width:
        about += meaning
    return [heading("Layers", about, width, marks), *table]


_SHARE = {
    "backward": "share of the backward pass",
    "forward": "share of the forward pass",
    SAVED_MEMORY: "share of what is saved for backward",
}


def _fields(tree: Tree, scale: units.TimeScale) -> list[_Field]:
    """The columns of numbers that this run has values for; the one that shares are shares of comes first."""
    top = add_up([row.node.total for row in tree.rows if row.level == 0])
    backward = _Field(f"bwd {scale.unit}", 0, lambda own, total: scale.text(total.backward_ns))
    if tree.metric == SAVED_MEMORY:
        return _memory_fields(top, replace(backward, drop=1))
    forward = _Field(f"fwd {scale.unit}", 1, lambda own, total: scale.text(total.forward_ns))
    if tree.metric == "forward":
        own_time = _Field("self", 4, lambda own, total: scale.text(own.forward_ns))
        fields = [replace(forward, drop=0), own_time, replace(backward, drop=1)]
    else:
        own_time = _Field("self", 4, lambda own, total: scale.text(own.backward_self_ns))
        fields = [backward, own_time, forward]
    fields[1:1] = _limit_fields(top, tree.metric, scale)
    fields.append(_Field("bwd:fwd", 3, lambda own, total: units.ratio(total.ratio)))
    if top.hook_ns:
        fields.append(_Field("hooks", 5, lambda own, total: scale.text(total.hook_ns)))
    if top.recompute_ns:
        fields.append(_Field("recompute", 5, lambda own, total: scale.text(total.recompute_ns)))
    if top.device_ns is not None:
        fields.append(_Field("device", 1, lambda own, total: scale.text(total.device_ns)))
    if top.launch_ns is not None:
        fields.append(_Field("launch", 5, lambda own, total: scale.text(total.launch_ns)))
    if top.saved_bytes is not None:
        fields.append(_Field("saved", 2, lambda own, total: units.size(total.saved_bytes)))
    if top.flops is not None or top.backward_flops is not None:
        fields.append(_Field("GFLOP/s", 10, _rate))
    if top.accumulate_ns:
        fields.append(_Field("accum", 11, lambda own, total: scale.text(total.accumulate_ns)))
    if top.gradient_sum_ns:
        fields.append(_Field("grad sum", 12, lambda own, total: scale.text(total.gradient_sum_ns)))
    return fields


def _limit_fields(top: Amounts, metric: str, scale: units.TimeScale) -> list[_Field]:
    """The time at this machine's limits, how near the layers come to it, and what limits them."""
    if (top.forward_limited if metric == "forward" else top.backward_limited) is None:
        return []
    return [
        _Field(_LIMIT, 5, lambda own, total: scale.text(total.limit_ns(metric))),
        _Field("reached", 9, lambda own, total: units.percent(total.reached(metric), 0)),
        _Field("bound by", 7, lambda own, total: total.bound_by(metric) or units.NOT_MEASURED, "left"),
    ]


def _memory_fields(top: Amounts, backward: _Field) -> list[_Field]:
    """What is saved, and how much is allocated and copied on the way there."""
    fields = [
        _Field("saved", 0, lambda own, total: units.size(total.saved_bytes)),
        _Field("self", 3, lambda own, total: units.size(own.saved_bytes)),
    ]
    if top.forward_allocated_bytes is not None:
        fields.append(_Field("fwd alloc", 2, lambda own, total: units.size(total.forward_allocated_bytes)))
    if top.backward_allocated_bytes is not None:
        fields.append(_Field("bwd alloc", 2, lambda own, total: units.size(total.backward_allocated_bytes)))
    if top.allocations is not None:
        fields.append(_Field("allocs", 5, lambda own, total: units.count(total.allocations)))
    if top.copied_bytes is not None:
        fields.append(_Field("copied", 4, lambda own, total: units.size(total.copied_bytes)))
    return [*fields, backward]


def _rate(own: Amounts, total: Amounts) -> str:
    """The rate of FLOPs: on a device of forward and backward over kernel time; on the CPU of backward over its time."""
    if total.device_ns:
        return units.rate_gflops(total.flops, total.device_ns)
    return units.rate_gflops(total.backward_flops, total.backward_ns)


def _layer_row(grid: Grid, row: TreeRow, fields: list[_Field], marks: Glyphs) -> None:
    node, accent = row.node, heat(row.own_share)
    guides = "".join("   " if last else marks.pipe for last in row.guides[:-1])
    if row.guides:
        guides += marks.corner if row.guides[-1] else marks.tee
    strong = "strong" if row.level == 0 or node.repeats > 1 else ""
    numbers: list[Line] = [[(marks.text(field.text(node.own, node.total)), "")] for field in fields]
    grid.row(
        [(guides, "dim"), (marks.text(node.name), strong)],
        [(marks.text(node.class_name), "dim")],
        [(numbers[0][0][0], accent)],
        [(units.percent(row.share), accent)],
        _bar(row.own_share, row.share, marks),
        *numbers[1:],
        [(units.calls(node.calls) if node.calls else units.NOT_MEASURED, "")],
    )
    if row.outlier:
        under = "".join("   " if last else marks.pipe for last in row.guides)
        grid.span([(under, "dim"), (marks.text(f"^ {row.outlier}"), "warn")])


def _dim_row(grid: Grid, label: str, share: float, numbers: list[str], marks: Glyphs) -> None:
    main, *others = ([(marks.text(number), "dim")] for number in numbers)
    bar = _bar(share, share, marks)
    grid.row([(marks.text(label), "dim")], [], main, [(units.percent(share), "dim")], bar, *others, [])


def _bar(own: float, total: float, marks: Glyphs) -> Callable[[int], Line]:
    def draw(width: int) -> Line:
        solid, light = marks.bar(own, total, width)
        return [(solid, "own"), (light, "below")]

    return draw
