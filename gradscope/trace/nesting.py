"""Which event encloses which, for properly nested intervals, by sorting alone."""

from __future__ import annotations

import numpy as np

from gradscope.tables import Int32Column, IntColumn


def nest(start_ns: IntColumn, end_ns: IntColumn, thread: Int32Column) -> tuple[Int32Column, Int32Column, IntColumn]:
    """Parent and depth of each row, and ends that reach at most to the parent's.

    Args:
        start_ns, end_ns, thread: columns sorted by (thread, start, longest first).

    Returns:
        ``(parent, depth, end_ns)``; ``parent`` is -1 at depth 0. An end beyond the parent's (two rows of a thread
        that overlap without nesting, as asynchronous rows do) is cut to it, so that self times stay >= 0.
    """
    parent = np.full(len(start_ns), -1, np.int32)
    depth = np.zeros(len(start_ns), np.int32)
    end = end_ns.copy()
    bounds = np.flatnonzero(np.diff(thread)) + 1
    for rows in np.split(np.arange(len(start_ns)), bounds) if len(start_ns) else []:
        first, last = int(rows[0]), int(rows[-1]) + 1
        _nest_thread(start_ns[first:last], end[first:last], parent[first:last], depth[first:last], first)
    return parent, depth, end


def _nest_thread(start: IntColumn, end: IntColumn, parent: Int32Column, depth: Int32Column, offset: int) -> None:
    """Fill ``parent`` and ``depth`` of one thread's rows and cut ``end``; all in place."""
    # Twice the time, so that an empty event can be closed half a tick after it opened: [2s, 2s+1] holds nothing
    # that starts later and lies inside whatever else starts at s.
    opened = 2 * (start - start[0])
    closed = 2 * (end - start[0]) + (end == start)
    # Row i is inside every earlier row that has not closed when it opens.
    finished = np.searchsorted(np.sort(closed), opened, side="right")
    level = (np.arange(len(start)) - finished).astype(np.int32)
    np.maximum(level, 0, out=level)
    depth[:] = level
    above = np.flatnonzero(level == 0)
    for current in range(1, int(level.max(initial=0)) + 1):
        rows = np.flatnonzero(level == current)
        local = above[np.searchsorted(above, rows) - 1]
        parent[rows] = local + offset
        end[rows] = np.minimum(end[rows], end[local])
        above = rows
