"""Traces made by hand: rows as (kind, start, end) and what else matters, nested as the readers nest them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope.tables import EventTable, IntColumn, RowKind, SpanTable
from gradscope.trace.tree import nest


@dataclass(frozen=True)
class Row:
    """One event; times in ns."""

    kind: RowKind
    start: int
    end: int
    name: str = "op"
    thread: int = 1
    argument: int = -1
    sequence: int = -1
    forward_thread: int = 0


def table_of(*rows: Row) -> EventTable:
    """The table of these rows, sorted and nested."""
    ordered = sorted(rows, key=lambda row: (row.thread, row.start, -row.end))
    names = tuple(dict.fromkeys(row.name for row in ordered))
    start, end, thread = (column(ordered, what) for what in ("start", "end", "thread"))
    parent, depth, end = nest(start, end, thread.astype(np.int32))
    return EventTable(
        names=names,
        name=np.array([names.index(row.name) for row in ordered], np.int32),
        kind=column(ordered, "kind").astype(np.int8),
        argument=column(ordered, "argument"),
        start_ns=start,
        end_ns=end,
        thread=thread.astype(np.int32),
        sequence=column(ordered, "sequence"),
        forward_thread=column(ordered, "forward_thread").astype(np.int32),
        parent=parent,
        depth=depth,
    )


def column(rows: list[Row], what: str) -> IntColumn:
    """One field of all rows."""
    return np.array([getattr(row, what) for row in rows], np.int64)


def place(table: EventTable, name: str) -> int:
    """The row of this name, of which there is one."""
    (found,) = np.flatnonzero(table.name == table.names.index(name)).tolist()
    return int(found)


def spans(*entries: tuple[int, int, int]) -> SpanTable:
    """Spans of (label, lowest number, number behind the highest)."""
    label, low, high = (np.array(part, np.int64) for part in zip(*entries, strict=True))
    return SpanTable(label, low, high)


NO_SPANS = SpanTable(*(np.empty(0, np.int64) for _ in range(3)))
