"""The tree of layers as a table: the centre of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

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
_ESTIMATED = Column("estimated", "est.", drop=2, legend="est.: split from kernels of several layers")


@dataclass(frozen=True, slots=True)
class _Number:
    """One column of numbers: what it shows of a layer with all below it, or ``alone``."""

    column: Column
    text: Callable[[Any], str]
    value: Callable[[Amounts], Any]
    alone: bool = False

    def of(self, own: Amounts, total: Amounts) -> str:
        """The text of a layer's own amounts and of those with all below it."""
        return self.text(self.value(own if self.alone else total))


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
        _rest_row(hidden.text, hidden.share, [number.of(hidden.own, hidden.own) for number in numbers])
        for hidden in tree.hidden
    ]
    if tree.rest > 0:
        rest = units.size(tree.rest) if tree.metric == SAVED_MEMORY else view.scale.text(tree.rest)
        rows.append(_rest_row("outside the layers", tree.rest_share, [rest]))
    bars = "solid: itself, light: layers below it"
    return Section("layers", "Layers", _SHARE[tree.metric], (Table(columns, tuple(rows)),), bars)


def _layer_row(row: TreeRow, numbers: list[_Number]) -> Row:
    node, accent = row.node, heat(row.own_share)
    main, *others = (number.of(node.own, node.total) for number in numbers)
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
    by_forward, time = tree.metric == "forward", scale.text
    backward = Column("backward_total_ns", "bwd", scale.unit, drop=int(tree.metric != "backward"))
    totals = [_Number(backward, time, attrgetter("backward_ns"))]
    if tree.metric == SAVED_MEMORY:
        return [*_memory_numbers(top), *totals]
    forward = Column("forward_total_ns", "fwd", scale.unit, drop=int(not by_forward))
    totals.insert(int(not by_forward), _Number(forward, time, attrgetter("forward_ns")))
    limited, alone = (
        (top.forward_limited, ("forward_self_ns", "fwd self", 7, "forward_ns"))
        if by_forward
        else (top.backward_limited, ("backward_self_ns", "bwd self", 7, "backward_self_ns"))
    )
    return [
        totals[0],
        *(_limits(tree.metric, scale) if limited is not None else ()),
        _number(time, *alone, alone=True),
        totals[1],
        _number(units.ratio, "ratio", "bwd:fwd", 3, "ratio"),
        *([_Number(_ESTIMATED, lambda it: units.percent(it, 0), attrgetter("estimated"))] if top.estimated_ns else ()),
        *_present(top, time, ("communication_ns", "comm", 4), ("overlapped_ns", "hidden", 6)),
        *_present(top, time, ("hook_ns", "hooks", 5), ("recompute_ns", "recompute", 5)),
        *_present(top, time, ("device_ns", "device", 1), ("launch_ns", "launch", 5)),
        *_present(top, units.size, ("saved_total_bytes", "saved", 2, "saved_bytes")),
        *(
            [_Number(Column("flops", "GFLOP/s", drop=11), str, _rate)]
            if any((it.flops, it.backward_flops) != (None, None) for it in (row.node.total for row in tree.rows))
            else ()
        ),
        *_present(top, time, ("accumulate_ns", "accum", 12), ("gradient_sum_ns", "fan-out", 13)),
    ]


def _limits(metric: str, scale: units.TimeScale) -> list[_Number]:
    """The time at this machine's limits, how near the layers come to it, and what limits them."""
    limit = Column(f"{metric}_limit_ns", "fwd limit" if metric == "forward" else "bwd limit", drop=5)
    bound = Column("bound_by", "bound by", align="left", drop=6)
    return [
        _Number(limit, scale.text, lambda total: total.limit_ns(metric)),
        _Number(Column("reached", "reached", drop=10), lambda it: units.percent(it, 0), lambda it: it.reached(metric)),
        _Number(bound, str, lambda total: total.bound_by(metric) or units.NOT_MEASURED),
    ]


def _memory_numbers(top: Amounts) -> list[_Number]:
    """What is saved, and how much is allocated and copied on the way there."""
    return [
        _number(units.size, "saved_total_bytes", "saved", 0, "saved_bytes"),
        _number(units.size, "saved_bytes", "saved self", 3, alone=True),
        *_present(top, units.size, ("forward_allocated_bytes", "fwd alloc", 2)),
        *_present(top, units.size, ("backward_allocated_bytes", "bwd alloc", 2)),
        *_present(top, units.count, ("allocations", "allocs", 5)),
        *_present(top, units.size, ("copied_bytes", "copied", 4)),
    ]


def _number(
    text: Callable[[Any], str], key: str, heading: str, drop: int, field: str = "", *, alone: bool = False
) -> _Number:
    """A column of one field of :class:`Amounts`: that of the column's key, unless another is given."""
    return _Number(Column(key, heading, drop=drop), text, attrgetter(field or key), alone)


def _present(top: Amounts, text: Callable[[Any], str], *columns: tuple[Any, ...]) -> list[_Number]:
    """Those of the columns that this run has values for: key, heading, drop, and the field where it is not the key."""
    numbers = [_number(text, *column) for column in columns]
    return [number for number in numbers if number.value(top) != number.value(Amounts())]


def _rate(total: Amounts) -> str:
    """The rate of FLOPs: on a device of forward and backward over kernel time; on the CPU of backward over its time."""
    if total.device_ns:
        return units.rate_gflops(total.flops, total.device_ns)
    return units.rate_gflops(total.backward_flops, total.backward_ns)
