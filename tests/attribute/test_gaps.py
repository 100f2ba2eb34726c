"""Gaps of threads, on timelines made at random and by hand: each is a stretch without rows in which something ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradscope import ops
from gradscope.attribute.gaps import Gap, done_elsewhere, find_gaps
from gradscope.tables import EventTable, RowKind

from .hand import Row, table_of

US = 1_000
INNER = ((RowKind.OP, "aten::mm"), (RowKind.CALL, "call"), (RowKind.COMMUNICATION, "c10d::allreduce_"))


def _inside(rng: np.random.Generator, start: int, end: int, level: int = 0) -> list[Row]:
    """Rows one behind the other in a stretch, and rows inside of these."""
    cuts = np.sort(rng.choice(np.arange(start + 1, end), min(6, end - start - 1) // 2 * 2, replace=False)).tolist()
    rows: list[Row] = []
    for first, last in zip(cuts[::2], cuts[1::2], strict=True):
        kind, name = INNER[rng.integers(len(INNER))]
        rows.append(Row(kind, first, last, name, argument=0))
        if level < 2 and last - first > 8:
            rows += _inside(rng, first, last, level + 1)
    return rows


def _made(seed: int) -> EventTable:
    """Two threads that train, and collectives that are done at any time but that at which a row begins."""
    rng = np.random.default_rng(seed)
    rows = [Row(row.kind, row.start, row.end, row.name, thread) for thread in (1, 2) for row in _inside(rng, 0, 400)]
    rows += [Row(RowKind.CALL, 410, 420, "call", thread) for thread in (1, 2)]
    starts, ends = {row.start for row in rows}, [row.end for row in rows]
    done = [*rng.choice(ends, 6).tolist(), *rng.integers(1, 409, 6).tolist()]
    rows += [
        Row(RowKind.COMMUNICATION, max(end - 30, 0), end, "gloo:all_reduce", 10 + number)
        for number, end in enumerate(done)
        if end not in starts
    ]
    return table_of(*(Row(row.kind, row.start * 5 * US, row.end * 5 * US, row.name, row.thread) for row in rows))


@pytest.mark.parametrize("seed", range(30))
def test_a_gap_is_without_rows_and_a_collective_is_done_in_it(seed: int) -> None:
    table = _made(seed)
    assert len(done_elsewhere(table))
    for gap in find_gaps(table):
        until = gap.start_ns + gap.ns
        assert gap.ns >= 20 * US  # what is shorter is Python between two rows
        assert gap.start_ns < table.end_ns[gap.collective] <= until
        thread = _thread_of(table, gap)
        mine = table.thread == thread
        assert not ((table.start_ns > gap.start_ns) & (table.start_ns < until) & mine).any()
        around = (table.start_ns <= gap.start_ns) & (table.end_ns >= until) & mine
        assert gap.row == (np.flatnonzero(around)[-1] if around.any() else -1)  # the innermost
        if gap.row >= 0:
            assert table.kind[gap.row] != RowKind.COMMUNICATION
            assert not table.names[table.name[gap.row]].startswith(ops.ATEN)


@pytest.mark.parametrize("seed", range(30))
def test_no_moment_of_a_thread_is_in_two_gaps(seed: int) -> None:
    table = _made(seed)
    found = find_gaps(table)
    for thread in (1, 2):
        spans = sorted((gap.start_ns, gap.start_ns + gap.ns) for gap in found if _thread_of(table, gap) == thread)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _thread_of(table: EventTable, gap: Gap) -> int:
    """By where the gap lies, for one between all rows does not say."""
    if gap.row >= 0:
        return int(table.thread[gap.row])
    behind = np.flatnonzero((table.thread < 10) & (table.end_ns == gap.start_ns))
    before = np.flatnonzero((table.thread < 10) & (table.start_ns == gap.start_ns + gap.ns))
    (thread,) = set(table.thread[behind].tolist()) & set(table.thread[before].tolist())
    return int(thread)
