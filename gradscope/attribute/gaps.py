"""Stretches in which a thread leaves no row since it waits in C++ for a collective: until DDP has its buffers.

``torch.distributed._broadcast_coalesced`` sends them and waits, which shows as own time of the module around it. The
threads of the process group tell when a collective was done: a stretch directly behind the row that began a broadcast,
in which one is done, was a wait for it until then. Waits that Python makes have rows, see
``marking_waits``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradscope import ops
from gradscope.attribute.rows import BoolColumn
from gradscope.tables import EventTable, IntColumn, RowKind

# Behind the end of a collective: until a thread that waited for it has a core, and Python's lock.
WOKEN_NS = 300_000
_SENDS = "c10d::broadcast"
_BEGUN = "c10d::"  # rows of the thread that begins a collective, whichever thread that is


@dataclass(slots=True)
class Gap:
    """A stretch in which a thread left no row, until a collective was done."""

    row: int  # that is open meanwhile
    collective: int  # row of a thread of the process group
    ns: int


def trains(table: EventTable) -> BoolColumn:
    """Return which rows are of threads that run steps, forward or backward."""
    kinds = (RowKind.STEP, RowKind.CALL, RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)
    return np.isin(table.thread, np.unique(table.thread[np.isin(table.kind, kinds)]))


def begins(table: EventTable) -> IntColumn:
    """Rows that begin a collective, in order of time."""
    named = np.array([text.startswith(_BEGUN) and not text.startswith(ops.WAIT_ROW) for text in table.names], bool)
    rows = np.flatnonzero((table.kind == RowKind.COMMUNICATION) & named[table.name])
    return rows[np.argsort(table.start_ns[rows], kind="stable")]


def done_elsewhere(table: EventTable) -> IntColumn:
    """Rows of the process group's threads: each lasts until its collective is done."""
    begun = np.array([text.startswith(_BEGUN) for text in table.names], bool)[table.name]
    return np.flatnonzero((table.kind == RowKind.COMMUNICATION) & (table.depth == 0) & ~trains(table) & ~begun)


def wait_for(name: str) -> str:
    """What a wait for this collective is called: ``(waits for gloo:broadcast)``."""
    return f"{ops.WAITS}{name})"


def names_of_waits(table: EventTable) -> tuple[str, ...]:
    """What gaps may be called."""
    return tuple(wait_for(table.names[name]) for name in np.unique(table.name[done_elsewhere(table)]).tolist())


def find_gaps(table: EventTable) -> list[Gap]:
    """The gaps of all threads that train, each once."""
    done = done_elsewhere(table)
    sent = begins(table)
    named = np.array([text.startswith(_SENDS) for text in table.names], bool)
    sent = sent[named[table.name[sent]] & (table.parent[sent] >= 0)]
    # DDP's forward has a range of torch's own around it.
    sent = sent[np.isin(table.kind[table.parent[sent]], (RowKind.CALL, RowKind.ANNOTATION))]
    if not len(done) or not len(sent):
        return []
    done = done[np.argsort(table.end_ns[done], kind="stable")]
    return list(_behind(table, sent[trains(table)[sent]], done))


def _behind(table: EventTable, sent: IntColumn, done: IntColumn) -> Iterator[Gap]:
    """The gap behind each of these rows, up to the last collective that is done in it."""
    until = table.end_ns[done]
    for thread in np.unique(table.thread[sent]).tolist():
        rows = np.flatnonzero(table.thread == thread)  # in order of start
        starts = table.start_ns[rows]
        for row in sent[table.thread[sent] == thread].tolist():
            begin, above = int(table.end_ns[row]), int(table.parent[row])
            place = int(np.searchsorted(starts, begin))  # behind what runs inside of it
            next_ns = int(starts[place]) if place < len(rows) else int(table.end_ns[above])
            last = min(next_ns, int(table.end_ns[above]))
            which = int(np.searchsorted(until, last, side="right")) - 1
            if which >= 0 and until[which] > begin:
                yield Gap(above, int(done[which]), min(last, int(until[which]) + WOKEN_NS) - begin)
