"""Gaps of threads, on timelines made at random: each follows a broadcast that a module began, until it is done."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.attribute.gaps import done_elsewhere, find_gaps, names_of_waits
from gradscope.tables import EventTable, RowKind

from .hand import Row, table_of

US = 1_000
WOKEN = 300 * US
INNER = (
    (RowKind.OP, "aten::mm"),
    (RowKind.CALL, "call"),
    (RowKind.COMMUNICATION, "c10d::broadcast_"),
    (RowKind.COMMUNICATION, "c10d::allreduce_"),
)


def _inside(rng: np.random.Generator, start: int, end: int, level: int = 0) -> list[Row]:
    """Rows one behind the other in a stretch, and rows inside of these."""
    cuts = np.sort(rng.choice(np.arange(start + 1, end), min(8, end - start - 1) // 2 * 2, replace=False)).tolist()
    rows: list[Row] = []
    for first, last in zip(cuts[::2], cuts[1::2], strict=True):
        kind, name = INNER[rng.integers(len(INNER))]
        rows.append(Row(kind, first, last, name, argument=0))
        if level < 2 and last - first > 8 and kind == RowKind.CALL:
            rows += _inside(rng, first, last, level + 1)
    return rows


def _made(seed: int) -> EventTable:
    """Two threads that train, and collectives that are done at any time."""
    rng = np.random.default_rng(seed)
    rows = [Row(row.kind, row.start, row.end, row.name, thread) for thread in (1, 2) for row in _inside(rng, 5, 395)]
    rows += [Row(RowKind.CALL, 0, 400, "call", thread) for thread in (1, 2)]
    rows += [
        Row(RowKind.COMMUNICATION, max(end - 30, 0), end, "gloo:broadcast", 10 + number)
        for number, end in enumerate(rng.integers(1, 409, 12).tolist())
    ]
    return table_of(*(Row(row.kind, row.start * 5 * US, row.end * 5 * US, row.name, row.thread) for row in rows))


@pytest.mark.parametrize("seed", range(40))
def test_each_gap_is_found_and_no_other(seed: int) -> None:
    """Beside the search, each row by itself: what follows it in its thread, and what is done until then."""
    table = _made(seed)
    done = table.end_ns[done_elsewhere(table)]
    expected = []
    for row in range(len(table)):
        above = int(table.parent[row])
        if table.names[table.name[row]] != "c10d::broadcast_" or table.kind[above] != RowKind.CALL:
            continue
        begin = table.end_ns[row]
        behind = table.start_ns[(table.thread == table.thread[row]) & (table.start_ns >= begin)]
        until = min(behind.min(initial=table.end_ns[above]), table.end_ns[above])
        inside = done[(done > begin) & (done <= until)]
        if len(inside):
            expected.append((above, min(until, inside.max() + WOKEN) - begin))
    assert sorted((gap.row, gap.ns) for gap in find_gaps(table)) == sorted(expected)


def test_some_are_found() -> None:
    assert sum(len(find_gaps(_made(seed))) for seed in range(40)) > 20


def test_a_row_that_begins_as_a_collective_is_done_ends_its_gap() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 900 * US, "call", argument=0),
        Row(RowKind.COMMUNICATION, 20 * US, 30 * US, "c10d::broadcast_"),
        Row(RowKind.COMMUNICATION, 25 * US, 400 * US, "gloo:broadcast", thread=2),
        Row(RowKind.OP, 400 * US, 500 * US, "aten::mm"),
    )
    (gap,) = find_gaps(table)
    assert gap.ns == 370 * US


def test_a_thread_that_only_begins_collectives_tells_of_none() -> None:
    """A helper of the program's own: its row is short, and nothing is done when that ends."""
    table = table_of(
        Row(RowKind.CALL, 0, 900 * US, "call", argument=0),
        Row(RowKind.COMMUNICATION, 20 * US, 30 * US, "c10d::broadcast_"),
        Row(RowKind.COMMUNICATION, 395 * US, 400 * US, "c10d::allreduce_", thread=2),
    )
    assert find_gaps(table) == [] and names_of_waits(table) == ()


@pytest.mark.parametrize("kind", [kind for kind in RowKind if kind != RowKind.COMMUNICATION])
def test_a_gap_lies_in_a_call_or_a_range(kind: RowKind) -> None:
    """DDP's forward has a range of torch's own around it; what waits in an operation is that one's own time."""
    table = table_of(
        Row(RowKind.CALL, 0, 900 * US, "call", argument=0),
        Row(kind, 10 * US, 800 * US, "DistributedDataParallel.forward", argument=1),
        Row(RowKind.COMMUNICATION, 20 * US, 30 * US, "c10d::broadcast_"),
        Row(RowKind.COMMUNICATION, 25 * US, 400 * US, "gloo:broadcast", thread=2),
    )
    found = [(table.kind[gap.row], gap.ns) for gap in find_gaps(table)]
    assert found == ([(kind, 670 * US)] if kind in (RowKind.CALL, RowKind.ANNOTATION) else [])


@pytest.mark.parametrize("seed", range(10))
def test_threads_that_do_not_train_have_none(seed: int) -> None:
    """What a helper of the program's waits for holds up no step, whatever rows it leaves."""
    table = _made(seed)
    rows = [
        Row(RowKind(kind), start, end, table.names[name], thread, argument)
        for kind, start, end, name, thread, argument in zip(
            *(getattr(table, what).tolist() for what in ("kind", "start_ns", "end_ns", "name", "thread", "argument")),
            strict=True,
        )
    ]
    helper = [
        Row(RowKind.ANNOTATION if row.kind == RowKind.CALL else row.kind, row.start, row.end, row.name, 3)
        for row in rows
        if row.thread == 1
    ]
    alone = [(gap.ns, gap.collective >= 0) for gap in find_gaps(table_of(*rows))]
    found = table_of(*rows, *helper)
    assert [(gap.ns, gap.collective >= 0) for gap in find_gaps(found)] == alone
    assert all(found.thread[gap.row] != 3 for gap in find_gaps(found))
