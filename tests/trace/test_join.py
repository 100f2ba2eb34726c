"""Stretches of a run that had a profiler each, as one trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradscope.attribute.rows import find_steps, read_skeleton, self_times
from gradscope.tables import EventTable, KernelTable, RowKind, SpanTable
from gradscope.trace.reader import joined
from gradscope.trace.tree import nest

Row = tuple[str, RowKind, int, int, int, int]  # name, kind, argument, start, end, thread


def table_of(rows: list[Row]) -> EventTable:
    """A table of rows given in order of thread and start, the longest first."""
    names = tuple(dict.fromkeys(row[0] for row in rows))
    start, end = (np.array([row[place] for row in rows], np.int64) for place in (3, 4))
    thread = np.array([row[5] for row in rows], np.int32)
    parent, depth, end = nest(start, end, thread)
    nothing = np.full(len(rows), -1, np.int64)
    return EventTable(
        names=names,
        name=np.array([names.index(row[0]) for row in rows], np.int32),
        kind=np.array([row[1] for row in rows], np.int8),
        argument=np.array([row[2] for row in rows], np.int64),
        start_ns=start,
        end_ns=end,
        thread=thread,
        sequence=nothing,
        forward_thread=np.zeros(len(rows), np.int32),
        parent=parent,
        depth=depth,
    )


def stretch(first: int, steps: int, begin: int, other: list[Row] | None = None, op: str = "aten::mul") -> EventTable:
    """Steps of 100 ns with an op of 60 and a part of 20 in each, from step ``first`` on."""
    rows: list[Row] = [("step", RowKind.STEP, first, begin, begin + 1, 1)]
    for step in range(steps):
        at = begin + 100 * step
        rows += [
            (op, RowKind.OP, -1, at + 10, at + 70, 1),
            ("aten::copy_", RowKind.OP, -1, at + 20, at + 40, 1),
            ("step", RowKind.STEP, first + step + 1, at + 100, at + 101, 1),
        ]
    return table_of([*rows, *(other or [])])


def test_one_stretch_is_itself() -> None:
    table = stretch(0, 3, 1000)
    assert joined([table]) is table


def test_steps_follow_each_other() -> None:
    whole = joined([stretch(0, 2, 1000), stretch(2, 1, 9_000_000, op="aten::tanh"), stretch(3, 2, 7_000_000_000)])
    skeleton = read_skeleton(whole, SpanTable(*(np.empty(0, np.int64),) * 3), ())
    steps = find_steps(skeleton, 0)
    assert steps.wall_ns.tolist() == [100] * 5
    ops = np.flatnonzero(whole.kind == RowKind.OP)
    assert steps.of_row[ops].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert self_times(whole)[ops].tolist() == [40, 20] * 5
    assert [whole.names[number] for number in whole.name[ops[::2]]] == ["aten::mul"] * 2 + ["aten::tanh"] + [
        "aten::mul"
    ] * 2
    assert whole.parent[ops[1::2]].tolist() == ops[::2].tolist()
    assert whole.argument[whole.kind == RowKind.STEP].tolist() == [0, 1, 2, 3, 4, 5]


def test_step_ends_with_its_optimizer() -> None:
    """Its hook wrote the mark, and the profiler stopped inside of the optimizer's row."""
    rows: list[Row] = [
        ("step", RowKind.STEP, 0, 0, 1, 1),
        ("Optimizer.step#SGD.step", RowKind.OPTIMIZER, -1, 50, 120, 1),
        ("step", RowKind.STEP, 1, 100, 101, 1),
    ]
    whole = joined([table_of(rows), stretch(1, 1, 5000)])
    steps = find_steps(read_skeleton(whole, SpanTable(*(np.empty(0, np.int64),) * 3), ()), 0)
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([0, 120], [120, 220])


def test_rows_of_other_threads_are_cut_at_the_ends() -> None:
    other: list[Row] = [
        ("read", RowKind.OP, -1, 8_000, 8_900, 2),  # before the stretch
        ("read", RowKind.OP, -1, 8_950, 9_050, 2),  # across its beginning
        ("part", RowKind.OP, -1, 9_010, 9_040, 2),
        ("read", RowKind.OP, -1, 9_080, 9_300, 2),  # across its end
        ("read", RowKind.OP, -1, 9_310, 9_400, 2),  # behind it
    ]
    whole = joined([stretch(0, 1, 1000), stretch(1, 1, 9_000, other), stretch(2, 1, 20_000)])
    rows = np.flatnonzero(whole.thread == 2)
    spans = list(zip((whole.start_ns[rows] - 1100).tolist(), (whole.end_ns[rows] - 1100).tolist(), strict=True))
    assert spans == [(0, 50), (10, 40), (80, 100)]
    assert whole.parent[rows].tolist() == [-1, rows[0], -1]


def test_kernels_keep_their_rows() -> None:
    def with_kernel(table: EventTable, at: int) -> EventTable:
        one = np.array([0], np.int64)
        return replace(table, kernels=KernelTable(("gemm",), one, one + at, one + at + 5, one, one, one + 1))

    other: list[Row] = [("read", RowKind.OP, -1, 1010, 1020, 2)]
    whole = joined([with_kernel(stretch(0, 1, 1000, other), 1030), with_kernel(stretch(1, 1, 9000), 9030)])
    assert whole.kernels is not None
    assert whole.kernels.start_ns.tolist() == [1030, 1130]
    assert [whole.names[whole.name[row]] for row in whole.kernels.row] == ["aten::mul", "aten::mul"]
    assert whole.start_ns[whole.kernels.row].tolist() == [1010, 1110]
