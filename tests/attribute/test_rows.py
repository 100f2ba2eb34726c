"""Steps, self times and phases of hand-made traces."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.attribute.nodes import above_lines, nearest
from gradscope.attribute.outside import adopt_outside_ops
from gradscope.attribute.rows import (
    Category,
    Skeleton,
    assign_rows,
    find_steps,
    read_skeleton,
    self_times,
)
from gradscope.tables import EventTable, RowKind

from .hand import NO_SPANS, Row, place, spans, table_of


def skeleton_of(table: EventTable) -> Skeleton:
    return read_skeleton(table, NO_SPANS, [])


@pytest.mark.parametrize("seed", range(30))
def test_what_other_threads_did_meanwhile_is_taken_off_once(seed: int) -> None:
    """A nanosecond in which a node ran on any other thread is not the backward row's own, however many ran then."""
    rng = np.random.default_rng(seed)
    windows = [(100, 400), (500, 700)]
    rows = [Row(RowKind.BACKWARD, start, end, "backward") for start, end in windows]
    rows += [Row(RowKind.NODE, 120, 150, "own node"), Row(RowKind.NODE, 600, 620, "own node")]
    busy: dict[int, set[int]] = {0: set(range(120, 150)), 1: set(range(600, 620))}
    for thread in (2, 3, 4):
        at = int(rng.integers(60, 200))
        while at < 680:
            end = at + int(rng.integers(0, 60))
            rows.append(Row(RowKind.ACCUMULATE if rng.random() < 0.3 else RowKind.NODE, at, end, "other", thread))
            for number, (start, stop) in enumerate(windows):
                if start <= at < stop:  # a row belongs to the pass that it starts in
                    # The own thread's nodes and the others' are both counted: the device's rows have their own clock.
                    busy.setdefault(10 + number, set()).update(range(at, min(end, stop)))
            at = end + int(rng.integers(1, 50))
    table = table_of(*rows)
    own = self_times(table)
    backward = np.flatnonzero(table.kind == RowKind.BACKWARD)
    for number, (row, (start, stop)) in enumerate(zip(backward.tolist(), windows, strict=True)):
        assert own[row] == max(0, stop - start - len(busy[number]) - len(busy.get(10 + number, ())))
    assert (own >= 0).all()


def test_rows_of_threads_that_overlap_are_counted_once() -> None:
    """Of 100 ns, 10-60 and 30-80 run on two threads: 30 are left. One inside the other takes nothing more."""
    table = table_of(
        Row(RowKind.BACKWARD, 0, 100, "backward"),
        Row(RowKind.NODE, 10, 60, "one", thread=2),
        Row(RowKind.NODE, 30, 80, "other", thread=3),
        Row(RowKind.NODE, 35, 40, "inside", thread=4),
        Row(RowKind.NODE, 70, 75, "late", thread=4),
        Row(RowKind.NODE, 100, 120, "afterwards", thread=2),
    )
    assert self_times(table)[place(table, "backward")] == 30


def test_self_times_add_up_to_the_roots() -> None:
    table = table_of(
        Row(RowKind.OP, 0, 100, "root"),
        Row(RowKind.OP, 10, 40, "child"),
        Row(RowKind.OP, 15, 25, "grandchild"),
        Row(RowKind.OP, 40, 90, "second"),
        Row(RowKind.OP, 200, 230, "alone"),
    )
    assert self_times(table).tolist() == [20, 20, 10, 50, 30]


MARKERS = (
    Row(RowKind.OPTIMIZER, 80, 100, "optimizer 0"),
    Row(RowKind.STEP, 95, 95, "step 0", argument=0),
    Row(RowKind.OP, 110, 120, "first"),
    Row(RowKind.OPTIMIZER, 180, 200, "optimizer 1"),
    Row(RowKind.OP, 185, 190, "in the optimizer"),
    Row(RowKind.STEP, 195, 195, "step 1", argument=1),
    Row(RowKind.OP, 198, 199, "behind the marker"),
    Row(RowKind.OP, 200, 210, "second"),
    Row(RowKind.STEP, 300, 300, "step 2", argument=2),
    Row(RowKind.OP, 300, 310, "afterwards"),
)


@pytest.mark.parametrize("at_markers", [False, True])
def test_a_step_ends_with_the_optimizers_row_or_at_the_marker(at_markers: bool) -> None:
    table = table_of(Row(RowKind.OP, 10, 20, "before"), *MARKERS)
    steps = find_steps(skeleton_of(table), 0, at_markers=at_markers)
    starts, ends = ([95, 195], [195, 300]) if at_markers else ([100, 200], [200, 300])
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == (starts, ends)
    of = {name: int(steps.of_row[place(table, name)]) for name in table.names if "step" not in name}
    assert (of["before"], of["first"], of["second"], of["afterwards"]) == (-1, 0, 1, -1)
    # What lies in one row is in one step: that in which the row began.
    assert of["optimizer 1"] == of["in the optimizer"] == of["behind the marker"] == 0


def test_skipped_steps_do_not_count() -> None:
    table = table_of(*MARKERS)
    steps = find_steps(skeleton_of(table), 1)
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([200], [300])
    assert [int(steps.of_row[place(table, name)]) for name in ("first", "second", "afterwards")] == [-1, 0, -1]


def test_steps_that_are_left_out_do_not_count() -> None:
    table = table_of(*MARKERS, Row(RowKind.STEP, 400, 400, "step 3", argument=3), Row(RowKind.OP, 350, 360, "third"))
    steps = find_steps(skeleton_of(table), 0, left_out=(1,))
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([100, 300], [200, 400])
    assert [int(steps.of_row[place(table, name)]) for name in ("first", "second", "third")] == [0, -1, 1]


def test_steps_may_end_in_one_thread_and_then_in_another() -> None:
    """A trainer's thread may end, and another go on; rows lie thread by thread."""
    markers = [Row(RowKind.STEP, at, at, f"step {at}", thread=thread, argument=at // 100) for at, thread in ENDS]
    steps = find_steps(skeleton_of(table_of(*markers)), 0)
    assert (steps.start_ns.tolist(), steps.end_ns.tolist()) == ([100, 200, 300], [200, 300, 400])


ENDS = ((100, 2), (200, 2), (300, 1), (400, 1))


def test_below_the_users_own_annotation_each_row_is_timed_by_itself() -> None:
    table = table_of(
        Row(RowKind.ANNOTATION, 0, 400, "epoch"),
        Row(RowKind.STEP, 100, 100, "step 0", argument=0),
        Row(RowKind.OP, 50, 60, "before"),
        Row(RowKind.OP, 150, 160, "first"),
        Row(RowKind.STEP, 200, 200, "step 1", argument=1),
        Row(RowKind.OP, 250, 260, "afterwards"),
    )
    steps = find_steps(skeleton_of(table), 0)
    assert [int(steps.of_row[place(table, name)]) for name in ("before", "first", "afterwards")] == [-1, 0, -1]


def test_only_what_follows_a_nodes_own_function_may_be_a_gradient_sum() -> None:
    """A pre-hook's addition comes before, and what the function adds itself is inside."""
    table = table_of(
        Row(RowKind.BACKWARD, 0, 100, "backward"),
        Row(RowKind.NODE, 10, 60, "MulBackward0", sequence=3, forward_thread=1),
        Row(RowKind.ADD, 12, 14, "of a pre-hook"),
        Row(RowKind.OP, 15, 40, "MulBackward0", sequence=3, forward_thread=1),
        Row(RowKind.ADD, 20, 25, "inside"),
        Row(RowKind.ADD, 40, 50, "the sum"),
        Row(RowKind.ADD, 70, 80, "of the engine"),
    )
    assert skeleton_of(table).sums.tolist() == [place(table, "the sum")]


def test_the_nearest_of_a_kind_begins_with_the_row_itself() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 100, "outer", argument=0),
        Row(RowKind.LINE, 5, 95, "line", argument=0),
        Row(RowKind.LINE, 6, 94, "line in line", argument=1),
        Row(RowKind.OP, 10, 20, "op"),
        Row(RowKind.OP, 200, 210, "alone"),
    )
    asked = np.array([place(table, name) for name in ("outer", "op", "alone")])
    outer, op, line = place(table, "outer"), place(table, "op"), place(table, "line in line")
    assert nearest(table, asked, (RowKind.CALL,)).tolist() == [outer, outer, -1]
    assert nearest(table, asked, (RowKind.LINE, RowKind.CALL)).tolist() == [outer, line, -1]
    assert nearest(table, np.array([-1, op]), (RowKind.OP,)).tolist() == [-1, op]
    assert above_lines(table, asked).tolist() == [-1, outer, -1]


def test_a_node_belongs_to_the_innermost_call_that_drew_its_number() -> None:
    """Numbers 0-9: the outer call has 1-7, the inner one 3-4; a number at a border belongs to what begins there."""
    table = table_of(
        Row(RowKind.OP, 1, 2, "aten::first", sequence=0),
        Row(RowKind.CALL, 10, 100, "outer", argument=0),
        Row(RowKind.CALL, 30, 50, "inner", argument=1),
        Row(RowKind.BACKWARD, 200, 500, "backward", argument=0),
        *(
            Row(RowKind.NODE, 210 + 10 * number, 215 + 10 * number, f"N{number}", sequence=number, forward_thread=1)
            for number in range(10)
        ),
        Row(RowKind.NODE, 400, 410, "of another thread", sequence=3, forward_thread=9),
    )
    skeleton = read_skeleton(table, spans((0, 1, 8), (1, 3, 5)), [-1, 0])
    assert skeleton.nodes.owner.tolist() == [-1, 0, 0, 1, 1, 0, 0, 0, -1, -1, -2]
    assert skeleton.nodes.sequence.tolist() == [*range(10), 3]


def test_a_node_from_before_the_trace_is_nobodys() -> None:
    """What made it was not seen: that is not known to be outside of every module."""
    table = table_of(
        Row(RowKind.OP, 1, 2, "aten::first", sequence=5),
        Row(RowKind.CALL, 10, 100, "call", argument=0),
        Row(RowKind.BACKWARD, 200, 500, "backward", argument=0),
        *(
            Row(RowKind.NODE, 210 + 10 * number, 215 + 10 * number, f"N{number}", sequence=number, forward_thread=1)
            for number in (3, 4, 5, 6)
        ),
    )
    assert read_skeleton(table, spans((0, 6, 7)), [-1]).nodes.owner.tolist() == [-2, -2, -1, 0]


def test_a_nodes_number_is_its_functions_where_the_engines_row_has_none() -> None:
    """A hook of the user's that runs an op first takes the number from the engine's row; a number it has is kept."""
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.BACKWARD, 100, 300, "backward", argument=0),
        Row(RowKind.NODE, 110, 150, "AddBackward0"),
        Row(RowKind.OP, 115, 118, "of the hook", sequence=9),
        Row(RowKind.OP, 120, 140, "AddBackward0", sequence=2, forward_thread=1),
        Row(RowKind.NODE, 160, 200, "MulBackward0", sequence=3, forward_thread=1),
        Row(RowKind.OP, 165, 190, "MulBackward0", sequence=2, forward_thread=1),
        Row(RowKind.NODE, 210, 220, "ExpBackward0", sequence=7, forward_thread=1),
    )
    skeleton = read_skeleton(table, spans((0, 2, 4)), [-1])
    assert skeleton.nodes.sequence.tolist() == [2, 3, 7]
    assert skeleton.nodes.owner.tolist() == [0, 0, -1]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_a_module_that_is_no_layer_computes_is_never_adopted(level: int) -> None:
    """A metric, or a transform of the next batch, at any time and however deep: it is what runs around it."""
    inside = [Row(RowKind.CALL, 150 + n, 190 - n, f"metric {n}", argument=1) for n in range(level)]
    table = table_of(
        Row(RowKind.STEP, 0, 0, "begin", argument=0),
        Row(RowKind.CALL, 100, 140, "call", argument=0),
        Row(RowKind.OP, 142, 148, "loss"),
        *inside,
        Row(RowKind.ANNOTATION, 160, 170, "range"),
        Row(RowKind.OP, 161, 165, "of the metric"),
        Row(RowKind.SHARDING, 171, 175, "FSDP::all_gather"),
        Row(RowKind.STEP, 300, 300, "end", argument=1),
    )
    skeleton = read_skeleton(table, spans((0, 0, 9), (-2, 9, 9)), [-1], ("Metric",))
    nothing = np.empty(0, np.int64)
    rows = assign_rows(skeleton, np.zeros(len(skeleton.nodes.row), np.int64), nothing, nothing)
    found = adopt_outside_ops(table, rows, find_steps(skeleton, 0))
    forward = {name for name in table.names if found.category[place(table, name)] == Category.FORWARD}
    assert forward == {"call", "loss"}
