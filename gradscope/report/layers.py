"""The tree of layers as a table: the centre of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradscope import units
from gradscope.document.parts import Bar, Cell, Column, Row, Section, Table, dim
from gradscope.document.style import heat
from gradscope.report.layer_cost import Amounts, add_up
from gradscope.report.tree import SAVED_MEMORY, Tree, TreeRow
from gradscope.report.view import View

_SHARE = {
    "backward": "share of the backward pass",
    "forward": "share of the forward pass",
    SAVED_MEMORY: "share of what is saved for backward",
}

# Of a layer's own amounts and of those with all below it.
_Amount: TypeAlias = Callable[[Amounts, Amounts], int | None]


@dataclass(frozen=True, slots=True)
class _Number:
    """One column of numbers, and the text of a layer's own amounts and of those with all below it."""

    column: Column
    text: Callable[[Amounts, Amounts], str]


def layers_section(view: View) -> Section:
    """Tree, what is hidden, and what no layer accounts for."""
    tree = view.tree
    if not tree.rows:
        return Section("layers", "Layers", "no layers were seen")
    numbers = _numbers(tree, view.scale)
    main, *others = numbers
    # A bar must be wide enough to compare, a name wide enough to recognise.
    columns = (
        Column("path", "layer", align="left", least=32, most=56),
        Column("class", "class", align="left", drop=8, least=9, most=22),
        main.column,
        Column("share", "share"),
        Column("bar", "", align="left", drop=3, least=10, most=24),
        *(number.column for number in others),
        Column("calls", "calls", drop=9),
    )
    rows = [_layer_row(row, numbers) for row in tree.rows]
    rows += [
        _rest_row(hidden.text, hidden.share, [number.text(hidden.own, hidden.own) for number in numbers])
        for hidden in tree.hidden
    ]
    if tree.rest > 0:
        rest = units.size(tree.rest) if tree.metric == SAVED_MEMORY else view.scale.text(tree.rest)
        rows.append(_rest_row("outside the layers", tree.rest_share, [rest]))
    about = f"{_SHARE[tree.metric]}; solid: itself, light: layers below it"
    return Section("layers", "Layers", about, (Table(columns, tuple(rows)),))


def _layer_row(row: TreeRow, numbers: list[_Number]) -> Row:
    node, accent = row.node, heat(row.own_share)
    main, *others = (number.text(node.own, node.total) for number in numbers)
    repeats = f" ×{node.repeats}" if node.repeats > 1 else ""
    name = Cell(node.label, "strong" if row.level == 0 or repeats else "", True, repeats, row.guides)
    cells: tuple[Cell | Bar, ...] = (
        name,
        Cell(node.class_name, "dim", code=True),
        Cell(main, accent),
        Cell(units.percent(row.share), accent),
        Bar(row.own_share, row.share),
        *(Cell(other) for other in others),
        Cell(units.calls(node.calls) if node.calls else units.NOT_MEASURED),
    )
    return Row(cells, note=row.outlier, note_style="warn")


def _rest_row(label: str, share: float, numbers: list[str]) -> Row:
    main, *others = dim(numbers)
    return Row((*dim([label, ""]), main, *dim([units.percent(share)]), Bar(share, share), *others), "rest")


def _numbers(tree: Tree, scale: units.TimeScale) -> list[_Number]:
    """The columns that this run has values for; the one that shares are shares of comes first."""
    top = add_up([row.node.total for row in tree.rows if row.level == 0])
    backward = _time(Column("backward_total_ns", "bwd", scale.unit, drop=1), scale, lambda own, all_: all_.backward_ns)
    if tree.metric == SAVED_MEMORY:
        return [*_memory_numbers(top), backward]
    forward = _time(Column("forward_total_ns", "fwd", scale.unit, drop=1), scale, lambda own, all_: all_.forward_ns)
    if tree.metric == "forward":
        main, other, limited = forward, backward, top.forward_limited
        self_time = _time(Column("forward_self_ns", "fwd self", drop=7), scale, lambda own, all_: own.forward_ns)
    else:
        main, other, limited = backward, forward, top.backward_limited
        self_time = _time(Column("backward_self_ns", "bwd self", drop=7), scale, lambda o, all_: o.backward_self_ns)
    return [
        replace(main, column=replace(main.column, drop=0)),
        *(_limits(tree.metric, scale) if limited is not None else ()),
        self_time,
        other,
        _Number(Column("ratio", "bwd:fwd", drop=3), lambda own, all_: units.ratio(all_.ratio)),
        *_optional_numbers(top, scale),
    ]


def _optional_numbers(top: Amounts, scale: units.TimeScale) -> list[_Number]:
    """Columns of what only some runs have."""
    saved = _size(Column("saved_total_bytes", "saved", drop=2), lambda own, all_: all_.saved_bytes)
    columns = (
        (top.hook_ns, _time(Column("hook_ns", "hooks", drop=5), scale, lambda own, all_: all_.hook_ns)),
        (
            top.recompute_ns,
            _time(Column("recompute_ns", "recompute", drop=5), scale, lambda own, all_: all_.recompute_ns),
        ),
        (
            top.device_ns is not None,
            _time(Column("device_ns", "device", drop=1), scale, lambda own, all_: all_.device_ns),
        ),
        (
            top.launch_ns is not None,
            _time(Column("launch_ns", "launch", drop=5), scale, lambda own, all_: all_.launch_ns),
        ),
        (top.saved_bytes is not None, saved),
        (
            top.flops is not None or top.backward_flops is not None,
            _Number(Column("flops", "GFLOP/s", drop=11), _rate),
        ),
        (
            top.accumulate_ns,
            _time(Column("accumulate_ns", "accum", drop=12), scale, lambda own, all_: all_.accumulate_ns),
        ),
        (
            top.gradient_sum_ns,
            _time(Column("gradient_sum_ns", "fan-out", drop=13), scale, lambda own, all_: all_.gradient_sum_ns),
        ),
    )
    return [number for present, number in columns if present]


def _limits(metric: str, scale: units.TimeScale) -> list[_Number]:
    """The time at this machine's limits, how near the layers come to it, and what limits them."""
    return [
        _Number(
            Column(f"{metric}_limit_ns", "fwd limit" if metric == "forward" else "bwd limit", drop=5),
            lambda own, total: scale.text(total.limit_ns(metric)),
        ),
        _Number(Column("reached", "reached", drop=10), lambda own, total: units.percent(total.reached(metric), 0)),
        _Number(
            Column("bound_by", "bound by", align="left", drop=6),
            lambda own, total: total.bound_by(metric) or units.NOT_MEASURED,
        ),
    ]


def _memory_numbers(top: Amounts) -> list[_Number]:
    """What is saved, and how much is allocated and copied on the way there."""
    forward = Column("forward_allocated_bytes", "fwd alloc", drop=2)
    backward = Column("backward_allocated_bytes", "bwd alloc", drop=2)
    columns = (
        (True, _size(Column("saved_total_bytes", "saved"), lambda own, all_: all_.saved_bytes)),
        (True, _size(Column("saved_bytes", "saved self", drop=3), lambda own, all_: own.saved_bytes)),
        (top.forward_allocated_bytes is not None, _size(forward, lambda own, all_: all_.forward_allocated_bytes)),
        (top.backward_allocated_bytes is not None, _size(backward, lambda own, all_: all_.backward_allocated_bytes)),
        (
            top.allocations is not None,
            _Number(Column("allocations", "allocs", drop=5), lambda own, all_: units.count(all_.allocations)),
        ),
        (
            top.copied_bytes is not None,
            _size(Column("copied_bytes", "copied", drop=4), lambda own, all_: all_.copied_bytes),
        ),
    )
    return [number for present, number in columns if present]


def _time(column: Column, scale: units.TimeScale, of: _Amount) -> _Number:
    return _Number(column, lambda own, all_: scale.text(of(own, all_)))


def _size(column: Column, of: _Amount) -> _Number:
    return _Number(column, lambda own, all_: units.size(of(own, all_)))


def _rate(own: Amounts, total: Amounts) -> str:
    """The rate of FLOPs: on a device of forward and backward over kernel time; on the CPU of backward over its time."""
    if total.device_ns:
        return units.rate_gflops(total.flops, total.device_ns)
    return units.rate_gflops(total.backward_flops, total.backward_ns)
