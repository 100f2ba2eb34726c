"""Takes what gradscope's own hooks cost a module call out of the times of the layers."""

from __future__ import annotations

import numpy as np

from gradscope.attribute.cost_table import Contribution
from gradscope.tables import OWN, EventTable, IntColumn, RowKind, SpanTable


def hook_cost(table: EventTable, calls: SpanTable) -> IntColumn:
    """For each row the ns of its own time in which gradscope's hooks ran, as they timed themselves.

    A hook that opens or closes a call's row runs in part before and behind it, which is the time of the row around it.
    The hook reads the clock behind the row's beginning and before its end: the little that the row is longer than the
    hooks think is a part of opening and closing it.
    """
    cost = np.zeros(len(table), np.int64)
    if calls.inside_ns is None or calls.around_ns is None or calls.open_ns is None:
        return cost
    rows = np.flatnonzero(table.kind == RowKind.CALL)
    number = table.argument[rows]
    around = calls.around_ns[number]
    within = np.clip(table.end_ns[rows] - table.start_ns[rows] - calls.open_ns[number], 0, around)
    cost[rows] = calls.inside_ns[number] + within
    above = table.parent[rows]
    np.add.at(cost, above[above >= 0], (around - within)[above >= 0])
    return cost


def take_out(own: Contribution, cost: IntColumn, names: tuple[str, ...]) -> tuple[Contribution, Contribution]:
    """``own`` without the cost, and the cost, which is no layer's; never more than a row's own time.

    Args:
        own: every row's own time, in the order of the rows.
        cost: of each row, see :func:`hook_cost`.
        names: of the operations; the cost is named as all that gradscope does in a step.
    """
    taken = np.minimum(cost, own.ns)
    rows = np.flatnonzero(taken > 0)
    op = np.full(len(rows), names.index(OWN), np.int64)
    hooks = Contribution(own.row[rows], op, taken[rows], np.zeros(len(rows), np.int64), apart=True)
    return Contribution(own.row, own.op, own.ns - taken, own.calls), hooks
