"""Steps, self times and phases of hand-made traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.nodes import above_lines, nearest
from gradscope.attribute.outside import adopt_outside_ops
from gradscope.attribute.rows import (
    Category,
    Rows,
    Skeleton,
    Steps,
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


@pytest.mark.parametrize("optimizer", [True, False])
def test_what_is_done_with_gradients_is_no_forward(optimizer: bool) -> None:
    """Clipping, unscaling, an update by hand; what makes nodes is another loss, or the next forward."""
    table = table_of(
        Row(RowKind.CALL, 101, 110, "call", argument=0),
        Row(RowKind.OP, 111, 115, "loss", sequence=3),
        Row(RowKind.BACKWARD, 116, 120, "backward", argument=0),
        Row(RowKind.CALL, 117, 118, "again", argument=0),
        Row(RowKind.OP, 121, 125, "penalty", sequence=4),
        Row(RowKind.OP, 122, 123, "part of that", sequence=4),
        Row(RowKind.BACKWARD, 126, 130, "second", argument=2),
        Row(RowKind.OP, 131, 135, "norm", sequence=5),
        Row(RowKind.OP, 132, 133, "part of the norm", sequence=5),
        Row(RowKind.OP, 136, 139, "clip"),
        Row(RowKind.CALL, 140, 150, "other call", argument=0),
        Row(RowKind.OP, 145, 146, "inside", sequence=5),
        Row(RowKind.BACKWARD, 151, 160, "last", argument=4),
        *([Row(RowKind.OPTIMIZER, 170, 190, "optimizer")] if optimizer else []),
        Row(RowKind.OP, 191, 195, "average", sequence=6),
        Row(RowKind.OP, 205, 210, "of the next step", sequence=6),
        Row(RowKind.OP, 211, 213, "behind", sequence=7),
        Row(RowKind.BACKWARD, 221, 225, "of that", argument=0),
        Row(RowKind.OP, 231, 235, "last of all", sequence=8),
    )
    category = np.full(len(table), Category.OTHER, np.int8)
    category[[place(table, name) for name in ("call", "other call", "inside")]] = Category.FORWARD
    category[place(table, "again")] = Category.RECOMPUTE
    of_row = np.searchsorted([100, 200, 300], table.start_ns, side="right") - 1
    rows = Rows(category, np.full(len(table), -1))
    found = adopt_outside_ops(table, rows, Steps(np.array([100, 200]), np.array([200, 300]), of_row))
    forward = {name for name in table.names if found.category[place(table, name)] == Category.FORWARD}
    makes_nodes = {"penalty", "part of that", "of the next step", "behind"}
    assert forward == {"call", "other call", "inside", "loss"} | makes_nodes


@pytest.mark.parametrize("number", [5, -1])
def test_a_compiled_function_behind_a_pass_is_forward_where_it_makes_a_node(number: int) -> None:
    """A loss of the next micro batch: its region has no number itself, and a graph's row lies between."""
    table = table_of(
        Row(RowKind.CALL, 101, 110, "call", argument=0),
        Row(RowKind.BACKWARD, 116, 120, "backward", argument=0),
        Row(RowKind.OP, 121, 122, "TorchDynamo Cache Lookup"),
        Row(RowKind.OP, 123, 140, "Torch-Compiled Region: 0/0"),
        Row(RowKind.OP, 124, 139, "CompiledFunction", sequence=number),
        Row(RowKind.GRAPH, 125, 138, "graph", argument=0),
        Row(RowKind.OP, 126, 130, "kernel", sequence=number),
        Row(RowKind.OP, 145, 146, "root gradient", sequence=6),
        Row(RowKind.BACKWARD, 147, 150, "second", argument=1),
        Row(RowKind.OP, 151, 160, "norm", sequence=6),
    )
    category = np.full(len(table), Category.OTHER, np.int8)
    category[place(table, "call")] = Category.FORWARD
    of_row = np.searchsorted([100, 200], table.start_ns, side="right") - 1
    rows = Rows(category, np.full(len(table), -1))
    found = adopt_outside_ops(table, rows, Steps(np.array([100]), np.array([200]), of_row))
    region = {"TorchDynamo Cache Lookup", "Torch-Compiled Region: 0/0", "CompiledFunction", "kernel"}
    forward = {name for name in table.names if found.category[place(table, name)] == Category.FORWARD}
    assert forward == {"call"} | (region if number >= 0 else set())


def forward_of(*rows: Row, recomputed: tuple[str, ...] = ()) -> set[str]:
    """The operations between 100 and 200 that are forward; calls are, but for those that a pass makes again."""
    table = table_of(*rows)
    category = np.full(len(table), Category.OTHER, np.int8)
    category[table.kind == RowKind.CALL] = Category.FORWARD
    category[[place(table, name) for name in recomputed]] = Category.RECOMPUTE
    of_row = np.where((table.start_ns >= 100) & (table.start_ns < 200), 0, -1)
    steps = Steps(np.array([100]), np.array([200]), of_row)
    found = adopt_outside_ops(table, Rows(category, np.full(len(table), -1)), steps)
    ops = np.isin(table.kind, (RowKind.OP, RowKind.ADD)) & (found.category == Category.FORWARD)
    return {table.names[name] for name in table.name[ops]}


CALL = Row(RowKind.CALL, 101, 110, "call", argument=0)
PASS = Row(RowKind.BACKWARD, 111, 120, "backward", argument=0)


def test_parts_of_an_operation_behind_a_pass_are_what_the_whole_is() -> None:
    """Each part sees the number that is next: the whole draws it when it ends."""
    names = ("whole", "first", "inmost", "second", "third")
    ends = ((121, 140), (122, 128), (123, 124), (125, 126), (130, 132))
    rows = [Row(RowKind.OP, *at, name, sequence=4) for name, at in zip(names, ends, strict=True)]
    assert forward_of(CALL, PASS, *rows, Row(RowKind.OP, 150, 151, "next", sequence=5)) == set(names)


def test_numbers_of_other_threads_and_of_nodes_tell_nothing_of_an_operation() -> None:
    """Each thread counts for itself; a row of backward has the number of its node, and the thread that made it."""
    norm = Row(RowKind.OP, 121, 125, "norm", sequence=4)
    behind = Row(RowKind.OP, 140, 141, "next", sequence=4)
    elsewhere = Row(RowKind.OP, 126, 127, "elsewhere", sequence=9, thread=2)
    nested = Row(RowKind.OP, 130, 131, "of a node", sequence=9, forward_thread=1)
    assert "norm" not in forward_of(CALL, PASS, norm, elsewhere, behind)
    assert "norm" not in forward_of(CALL, PASS, norm, nested, behind)


def test_an_operation_that_begins_when_another_ends_is_behind_it() -> None:
    rows = [Row(RowKind.OP, 121, 125, "loss", sequence=4), Row(RowKind.OP, 125, 130, "next", sequence=5)]
    assert forward_of(CALL, PASS, *rows) == {"loss"}


@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_the_last_operation_of_a_thread_is_forward_where_no_module_is_seen(calls: tuple[Row, ...]) -> None:
    """It may be the forward pass of the next step; where modules are called that would call one."""
    assert forward_of(*calls, PASS, Row(RowKind.OP, 121, 125, "last", sequence=4)) == (set() if calls else {"last"})


def test_the_last_operation_of_a_thread_made_what_backward_runs_behind_it() -> None:
    """The loss of the last measured step: no operation follows that would tell."""
    loss = Row(RowKind.OP, 121, 125, "loss", sequence=4)
    passed = Row(RowKind.BACKWARD, 126, 150, "second", argument=0)
    node = Row(RowKind.NODE, 127, 130, "node", sequence=4, forward_thread=1)
    assert forward_of(CALL, PASS, loss, passed, node) == {"loss"}
    assert forward_of(CALL, PASS, loss, passed, replace(node, sequence=3)) == set()
    assert forward_of(CALL, PASS, loss, passed, replace(node, forward_thread=2)) == set()


@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_an_update_by_hand_in_front_of_forward_is_none(calls: tuple[Row, ...]) -> None:
    """Of the gradients of the step before: where no optimizer steps, steps end with backward."""
    rows = [
        Row(RowKind.OP, 100, 101, "update", sequence=4),
        *calls,
        *([] if calls else [Row(RowKind.OP, 115, 116, "TorchDynamo Cache Lookup")]),
        Row(RowKind.OP, 121, 130, "matmul", sequence=4),
        Row(RowKind.OP, 122, 123, "inside", sequence=4),
        Row(RowKind.OP, 131, 132, "mask", sequence=5),
        Row(RowKind.OP, 133, 134, "loss", sequence=5),
        Row(RowKind.BACKWARD, 140, 150, "backward", argument=4),
        Row(RowKind.OP, 210, 211, "of the next step", sequence=6),
    ]
    lookup = set() if calls else {"TorchDynamo Cache Lookup"}
    assert forward_of(*rows) == {"matmul", "inside", "mask", "loss"} | lookup


def test_what_a_pass_calls_again_is_no_forward_that_goes_on() -> None:
    again = Row(RowKind.CALL, 112, 115, "again", argument=0)
    rows = [Row(RowKind.OP, 121, 125, "norm", sequence=4), Row(RowKind.OP, 126, 127, "next", sequence=4)]
    assert forward_of(CALL, PASS, again, *rows, recomputed=("again",)) == set()


def test_ops_outside_of_modules_are_forward_once_it_began() -> None:
    table = table_of(
        Row(RowKind.CALL, 101, 103, "transform", argument=-1),
        Row(RowKind.OP, 105, 110, "data"),
        Row(RowKind.CALL, 120, 140, "call", argument=0),
        Row(RowKind.OP, 125, 130, "inside"),
        Row(RowKind.OP, 150, 160, "loss"),
        Row(RowKind.ADD, 161, 164, "sum of losses"),
        Row(RowKind.ANNOTATION, 165, 180, "enumerate(DataLoader)#_SingleProcess"),
        Row(RowKind.OP, 170, 175, "batch"),
        Row(RowKind.OP, 205, 210, "functional"),
        Row(RowKind.OP, 305, 310, "not measured"),
    )
    category = np.full(len(table), Category.OTHER, np.int8)
    category[[place(table, "call"), place(table, "inside")]] = Category.FORWARD
    of_row = np.searchsorted([100, 200, 300], table.start_ns, side="right") - 1
    of_row[of_row == 2] = -1
    rows = Rows(category, np.full(len(table), -1))
    found = adopt_outside_ops(table, rows, Steps(np.array([100, 200]), np.array([200, 300]), of_row))
    forward = {name for name in table.names if found.category[place(table, name)] == Category.FORWARD}
    # The second step has no call at all: it is all forward.
    assert forward == {"call", "inside", "loss", "sum of losses", "functional"}


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
