"""What is communication between ranks: collectives, and waits for other ranks, which have no rows of their own.

DDP's reducer, and FSDP, wait in callbacks that the engine runs behind the last node of a pass
(``torch::autograd::Engine::queue_callback``): what such a pass spends there by itself is waiting, until the last
collective that it began is done. DDP's buffers are waited for in a gap (:mod:`gradscope.attribute.gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gradscope import ops
from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.device import Stretches
from gradscope.attribute.gaps import WOKEN_NS, done_elsewhere, find_gaps, trains, wait_for
from gradscope.attribute.nodes import nearest, passes_around
from gradscope.attribute.rows import INHERIT, BoolColumn, Category, Skeleton, beside_nodes
from gradscope.tables import EventTable, IntColumn, RowKind


def take_out_waits(
    assigned: Assigned, own: Contribution, names: tuple[str, ...], *, hooked: bool = False
) -> tuple[Contribution, list[Contribution]]:
    """``own`` without the waits that have no rows, and the waits.

    For tensors on the CPU: on a device it is a stream that waits, and the callback only tells it to. Behind the last
    node of a pass a wait is communication, in a module's forward it stays the module's.

    Args:
        own: every row's own time, in the order of the rows.
        names: of the operations.
        hooked: a hook of the program's own reduces gradients, and may go on behind a collective.
    """
    table = assigned.skeleton.table
    behind = np.minimum(waits_behind(table, hooked=hooked), own.ns)
    rows = np.flatnonzero(behind > 0)
    op = np.full(len(rows), names.index(ops.WAIT), np.int64)
    found = [Contribution(rows, op, behind[rows], np.ones(len(rows), np.int64), Category.COMMUNICATION)]
    left = own.ns - behind
    gaps = find_gaps(table)
    for gap in gaps:
        gap.ns = min(gap.ns, int(left[gap.row]))
        left[gap.row] -= gap.ns
    rows, ns = (np.array([getattr(gap, what) for gap in gaps], np.int64) for what in ("row", "ns"))
    op = np.array([names.index(wait_for(table.names[table.name[gap.collective]])) for gap in gaps], np.int64)
    waits = Contribution(rows, op, ns, np.ones(len(gaps), np.int64), communicates=True)
    backward = assigned.skeleton.in_backward[rows]  # of a call that is run again
    found.append(waits.only(np.flatnonzero(~backward)))
    again = waits.only(np.flatnonzero(backward))
    found.append(replace(again, apart=Category.COMMUNICATION, layer=assigned.rows.owner[again.row]))
    return Contribution(own.row, own.op, left, own.calls), found


def communication_rows(skeleton: Skeleton) -> BoolColumn:
    """Return which rows are collectives, FSDP's work for them, or what runs inside of these, in any phase.

    Not what threads of the process group do meanwhile: nobody waits for that but where a row says so.
    """
    table = skeleton.table
    marks = np.full(len(table), INHERIT, np.int8)
    marks[np.isin(table.kind, (RowKind.CALL, RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE))] = 0
    marks[np.isin(table.kind, (RowKind.COMMUNICATION, RowKind.SHARDING))] = 1
    return skeleton.levels.propagate(marks, 0).astype(bool) & trains(table)


def without_process_group(assigned: Assigned) -> Assigned:
    """``assigned`` without the rows of the process group's own threads: they are no part of a step."""
    table = assigned.skeleton.table
    marks = np.full(len(table), INHERIT, np.int8)
    marks[table.depth == 0] = 0
    marks[done_elsewhere(table)] = 1
    theirs = assigned.skeleton.levels.propagate(marks, 0).astype(bool)
    found = replace(assigned, steps=replace(assigned.steps, of_row=np.where(theirs, -1, assigned.steps.of_row)))
    kernels = table.kernels
    if kernels is None:
        return found
    # What they launch runs beside the step: nobody in it is known to have.
    row = np.where((kernels.row >= 0) & theirs[np.maximum(kernels.row, 0)], -1, kernels.row)
    table = replace(table, kernels=replace(kernels, row=row))
    return replace(found, skeleton=replace(assigned.skeleton, table=table))


@dataclass(frozen=True, slots=True)
class Behind:
    """What follows the last node of a pass.

    Attributes:
        last_ns: when that was done.
        until_ns: when the pass ends; with DDP when it has copied the last gradient, behind which it waits for nothing.
        rows: stretches in which a row of the pass itself was open.
    """

    last_ns: int
    until_ns: int
    rows: Stretches

    def waited_ns(self, until: int) -> int:
        """How long no row was open, until this moment."""
        until = min(max(until, self.last_ns), self.until_ns)
        return until - self.last_ns - int(self.rows.until(np.array([until]))[0])


def behind_last_nodes(table: EventTable, windows: IntColumn) -> dict[int, Behind]:
    """What follows the last node of each of these passes."""
    nodes = np.flatnonzero(np.isin(table.kind, (RowKind.NODE, RowKind.ACCUMULATE)))
    around = passes_around(table, nodes)
    last = table.start_ns.copy()
    np.maximum.at(last, around[around >= 0], table.end_ns[nodes[around >= 0]])
    # Callbacks run below the pass; where the engine has a thread of its own, on that, below nothing.
    behind = np.concatenate([np.flatnonzero(np.isin(table.parent, windows)), beside_nodes(table)])
    of = passes_around(table, behind)
    behind, of = behind[of >= 0], of[of >= 0]
    behind, of = behind[table.start_ns[behind] >= last[of]], of[table.start_ns[behind] >= last[of]]
    copies = copies_of_gradients(table)
    found = {}
    for window in windows.tolist():
        rows = behind[of == window]
        copied = rows[copies[rows]]
        until = table.end_ns[copied].max() if len(copied) else table.end_ns[window]
        stretches = Stretches.union(table.start_ns[rows], table.end_ns[rows])
        found[window] = Behind(int(last[window]), int(until), stretches)
    return found


def copies_of_gradients(table: EventTable) -> BoolColumn:
    """Return which rows copy a gradient out of a bucket of DDP."""
    return np.array([name.endswith("::copy_bucket_to_grad") for name in table.names], bool)[table.name]


def waits_behind(table: EventTable, *, hooked: bool) -> IntColumn:
    """For each row how long it waited: of an outermost pass with such callbacks the time behind its last node."""
    found = np.zeros(len(table), np.int64)
    later = _that_wait_later(table)
    around = passes_around(table, later)
    windows = np.unique(around[around >= 0])
    done = done_elsewhere(table)
    for window, behind in behind_last_nodes(table, windows).items():
        until = behind.until_ns
        if not hooked:
            until = min(until, _done_ns(table, done, later[around == window], window))
        found[window] = max(behind.waited_ns(until), 0)
    return found


def _done_ns(table: EventTable, done: IntColumn, later: IntColumn, window: int) -> int:
    """When the last collective that these rows of a pass began was done; the end of the pass where nothing tells."""
    first = table.start_ns[later].min()
    done = done[(table.start_ns[done] >= first) & (table.start_ns[done] <= table.end_ns[window])]
    return int(table.end_ns[done].max()) + WOKEN_NS if len(done) else int(table.end_ns[window])


def _that_wait_later(table: EventTable) -> IntColumn:
    """Rows that leave a wait to the end of their pass: FSDP's, and collectives begun where a gradient is ready."""
    begun = np.flatnonzero(table.kind == RowKind.COMMUNICATION)
    above = nearest(table, begun, (RowKind.ACCUMULATE, RowKind.NODE, RowKind.CALL))
    ready = (above >= 0) & (table.kind[above] == RowKind.ACCUMULATE)
    return np.concatenate([np.flatnonzero(table.kind == RowKind.SHARDING), begun[ready]])
