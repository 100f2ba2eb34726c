"""What is communication between ranks: collectives, and waits for other ranks that have no rows of their own.

DDP's reducer, and FSDP, wait for their last collectives in callbacks that the engine runs behind the last node of a
pass (``torch::autograd::Engine::queue_callback``). What such a pass spends there by itself is waiting.
"""

from __future__ import annotations

import numpy as np

from gradscope import ops
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.device import Stretches
from gradscope.attribute.nodes import nearest, outermost_passes, pass_of
from gradscope.attribute.rows import INHERIT, BoolColumn, Category, Skeleton
from gradscope.tables import EventTable, IntColumn, RowKind


def take_out_waits(skeleton: Skeleton, own: Contribution, names: tuple[str, ...]) -> tuple[Contribution, Contribution]:
    """``own`` without the waits, and the waits, which are communication of no layer.

    For tensors on the CPU: on a device it is a stream that waits, and the callback only tells it to.

    Args:
        own: every row's own time, in the order of the rows.
        names: of the operations.
    """
    taken = np.minimum(_waits(skeleton.table), own.ns)
    rows = np.flatnonzero(taken > 0)
    op = np.full(len(rows), names.index(ops.WAIT), np.int64)
    waits = Contribution(own.row[rows], op, taken[rows], np.ones(len(rows), np.int64), Category.COMMUNICATION)
    return Contribution(own.row, own.op, own.ns - taken, own.calls), waits


def communication_rows(skeleton: Skeleton) -> BoolColumn:
    """Return which rows are collectives, FSDP's work for them, or what runs inside of these, in any phase.

    Not what threads of the process group do meanwhile: nobody waits for that but where a row says so.
    """
    table = skeleton.table
    kinds = (RowKind.STEP, RowKind.CALL, RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)
    trains = np.isin(table.thread, np.unique(table.thread[np.isin(table.kind, kinds)]))
    marks = np.full(len(table), INHERIT, np.int8)
    marks[np.isin(table.kind, (RowKind.CALL, RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE))] = 0
    marks[np.isin(table.kind, (RowKind.COMMUNICATION, RowKind.SHARDING))] = 1
    return skeleton.levels.propagate(marks, 0).astype(bool) & trains


def behind_last_nodes(table: EventTable, windows: IntColumn) -> dict[int, tuple[int, Stretches]]:
    """For each pass when its last node was done, and the stretches behind that in which a row of its own was open."""
    nodes = np.flatnonzero(np.isin(table.kind, (RowKind.NODE, RowKind.ACCUMULATE)))
    around = passes_around(table, nodes)
    last = table.start_ns.copy()
    np.maximum.at(last, around[around >= 0], table.end_ns[nodes[around >= 0]])
    behind = np.flatnonzero(np.isin(table.parent, windows))
    behind = behind[table.start_ns[behind] >= last[table.parent[behind]]]
    found = {}
    for window in windows.tolist():
        rows = behind[table.parent[behind] == window]
        found[window] = (int(last[window]), Stretches.union(table.start_ns[rows], table.end_ns[rows]))
    return found


def _waits(table: EventTable) -> IntColumn:
    """For each row how long it waited: of an outermost pass with such callbacks the time behind its last node."""
    found = np.zeros(len(table), np.int64)
    around = passes_around(table, _that_wait_later(table))
    windows = np.unique(around[around >= 0])
    for window, (last, rows) in behind_last_nodes(table, windows).items():
        found[window] = max(int(table.end_ns[window]) - last - int(rows.before[-1]), 0)
    return found


def _that_wait_later(table: EventTable) -> IntColumn:
    """Rows that leave a wait to the end of their pass: FSDP's, and collectives begun where a gradient is ready."""
    begun = np.flatnonzero(table.kind == RowKind.COMMUNICATION)
    above = nearest(table, begun, (RowKind.ACCUMULATE, RowKind.NODE, RowKind.CALL))
    ready = (above >= 0) & (table.kind[above] == RowKind.ACCUMULATE)
    return np.concatenate([np.flatnonzero(table.kind == RowKind.SHARDING), begun[ready]])


def passes_around(table: EventTable, rows: IntColumn) -> IntColumn:
    """Return the row of the outermost pass during which each of these rows began, on whatever thread; -1 for none."""
    windows = outermost_passes(table)
    if not len(windows):
        return np.full(len(rows), -1, np.int64)
    number = pass_of(table, rows)
    window = windows[np.maximum(number, 0)]
    return np.where((number >= 0) & (table.start_ns[rows] < table.end_ns[window]), window, -1)
