"""Stretches in which a thread leaves no row since it waits for a collective.

Who waits for one, from Python (``Work.wait``) or in C++ (DDP sends its buffers, ``torch.distributed.nn`` exchanges
tensors), leaves no row: it is the own time of whatever row is open, or lies between all rows. The threads of the
process group tell when a collective was done: a stretch without rows that ends as soon as one is was a wait for it. Of
what is received from one rank, as stages of a pipeline do, they tell nothing: a stretch without rows directly behind
its row is taken for the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradscope import ops
from gradscope.attribute.rows import BoolColumn
from gradscope.tables import EventTable, IntColumn, RowKind

# Behind the end of a collective: until a thread that waited for it has a core, and Python's lock. Where the gap follows
# the row that began one, as in all calls that wait at once, it may take longer: a quarter of the gap. Elsewhere Python
# may do something of its own, which ends near a collective's end by chance.
_WOKEN_NS, _WOKEN_AT_ONCE_NS = 300_000, 1_000_000
_WOKEN_AT_ONCE = 0.25
_LEAST_NS = 20_000  # what is shorter is Python between two rows


@dataclass(slots=True)
class Gap:
    """A stretch in which a thread left no row, until a collective was done."""

    row: int  # that is open meanwhile; -1 for none
    collective: int  # row of a thread of the process group
    start_ns: int
    ns: int


def trains(table: EventTable) -> BoolColumn:
    """Return which rows are of threads that run steps, forward or backward."""
    kinds = (RowKind.STEP, RowKind.CALL, RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)
    return np.isin(table.thread, np.unique(table.thread[np.isin(table.kind, kinds)]))


def done_elsewhere(table: EventTable) -> IntColumn:
    """Rows of the process group's threads: each lasts until its collective is done."""
    return np.flatnonzero((table.kind == RowKind.COMMUNICATION) & (table.depth == 0) & ~trains(table))


def wait_for(name: str) -> str:
    """What a wait for this collective is called: ``(waits for gloo:all_reduce)``."""
    return f"{ops.WAITS}{name})"


def received(table: EventTable) -> IntColumn:
    """Rows that begin to receive from one rank."""
    receives = np.array([name.startswith("c10d::recv") for name in table.names], bool)
    return np.flatnonzero((table.kind == RowKind.COMMUNICATION) & receives[table.name])


def names_of_waits(table: EventTable) -> tuple[str, ...]:
    """What gaps may be called."""
    rows = np.concatenate([done_elsewhere(table), received(table)])
    return tuple(wait_for(table.names[name]) for name in np.unique(table.name[rows]).tolist())


def find_gaps(table: EventTable) -> list[Gap]:
    """The gaps of all threads that train, each once."""
    done = done_elsewhere(table)
    done = done[np.argsort(table.end_ns[done], kind="stable")]
    receives = received(table)
    if not len(done) and not len(receives):
        return []
    computes = np.array([name.startswith(ops.ATEN) for name in table.names], bool)[table.name]
    communicates = np.isin(table.kind, (RowKind.COMMUNICATION, RowKind.SHARDING))
    found: dict[tuple[int, int], Gap] = {}
    for thread in np.unique(table.thread[trains(table)]).tolist():
        rows = np.flatnonzero(table.thread == thread)  # in order of start
        for gap in (*_of_thread(table, rows, done), *_behind(table, rows, receives)):
            # An operation works by itself, and what communicates is known to.
            if gap.row < 0 or not (computes[gap.row] or communicates[gap.row]):
                found[thread, gap.start_ns] = gap  # of several collectives that are done meanwhile the last counts
    return list(found.values())


def _behind(table: EventTable, rows: IntColumn, receives: IntColumn) -> Iterator[Gap]:
    """The gap directly behind each of these rows."""
    starts = table.start_ns[rows]
    for receive in rows[np.isin(rows, receives)].tolist():
        begin, above = int(table.end_ns[receive]), int(table.parent[receive])
        ends = [int(table.end_ns[above])] if above >= 0 else []
        place = int(np.searchsorted(starts, begin))  # behind what runs inside of it
        ends += [int(starts[place])] if place < len(rows) else []
        if ends and min(ends) - begin >= _LEAST_NS:
            yield Gap(above, receive, begin, min(ends) - begin)


def _of_thread(table: EventTable, rows: IntColumn, done: IntColumn) -> Iterator[Gap]:
    starts = table.start_ns[rows]
    until = table.end_ns[done]
    before = np.searchsorted(starts, until, side="right") - 1
    for collective, end, place in zip(done.tolist(), until.tolist(), before.tolist(), strict=True):
        if place < 0:
            continue
        row, begin, begin_row = int(rows[place]), int(starts[place]), -1
        while row >= 0 and table.end_ns[row] < end:  # closed by then: the gap is behind it
            begin, begin_row, row = int(table.end_ns[row]), row, int(table.parent[row])
        ends = [int(table.end_ns[row])] if row >= 0 else []
        ends += [int(starts[place + 1])] if place + 1 < len(rows) else []
        if not ends:
            continue
        last = min(ends)
        at_once = begin_row >= 0 and table.kind[begin_row] == RowKind.COMMUNICATION
        woken = max(_WOKEN_AT_ONCE_NS, _WOKEN_AT_ONCE * (last - begin)) if at_once else _WOKEN_NS
        if last - end <= woken and last - begin >= _LEAST_NS:
            yield Gap(row, collective, begin, last - begin)
