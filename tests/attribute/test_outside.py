"""Which operations outside of every module are forward, on timelines made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.outside import adopt_outside_ops
from gradscope.attribute.rows import (
    Category,
    Rows,
    Steps,
)
from gradscope.tables import RowKind

from .hand import Row, place, table_of


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


def test_what_sees_no_number_makes_no_node_though_it_is_the_last() -> None:
    """A metric below ``torch.no_grad()``, where no module is seen that would tell when forward begins."""
    assert forward_of(PASS, Row(RowKind.OP, 121, 125, "metric")) == set()


def test_what_lies_in_another_kind_of_row_is_what_is_around_that() -> None:
    """A compiled graph's row: the kernel in it, and the copy behind it, are parts of the function."""
    rows = [
        Row(RowKind.OP, 121, 140, "function", sequence=4),
        Row(RowKind.GRAPH, 122, 130, "graph", argument=0),
        Row(RowKind.OP, 123, 125, "kernel", sequence=4),
        Row(RowKind.OP, 131, 132, "copy", sequence=4),
        Row(RowKind.OP, 150, 151, "next", sequence=5),
    ]
    assert forward_of(CALL, PASS, *rows) == {"function", "kernel", "copy"}


def test_where_code_is_looked_for_is_what_comes_next_in_its_own_thread() -> None:
    rows = [
        Row(RowKind.OP, 121, 122, "TorchDynamo Cache Lookup"),
        Row(RowKind.OP, 123, 124, "norm", sequence=4, thread=2),
        Row(RowKind.OP, 125, 126, "clip", sequence=4, thread=2),
        Row(RowKind.OP, 130, 140, "function", sequence=4),
        Row(RowKind.OP, 150, 151, "next", sequence=5),
    ]
    assert forward_of(CALL, PASS, *rows) == {"TorchDynamo Cache Lookup", "function"}


def test_what_follows_an_update_is_none_though_a_module_was_called_before_that() -> None:
    """An evaluation between backward and the update, and an average of the weights behind that."""
    evaluation = Row(RowKind.CALL, 121, 125, "evaluation", argument=0)
    average = [Row(RowKind.OP, 141, 145, "average", sequence=4), Row(RowKind.OP, 146, 147, "next", sequence=4)]
    assert forward_of(CALL, PASS, evaluation, *average) == {"average", "next"}  # its metric, say
    assert forward_of(CALL, PASS, evaluation, Row(RowKind.OPTIMIZER, 130, 140, "update"), *average) == set()


def test_what_another_thread_computes_while_backward_runs_is_not_behind_it() -> None:
    rows = [Row(RowKind.OP, at, at + 1, f"op {at}", sequence=4, thread=2) for at in (113, 125)]
    assert forward_of(CALL, PASS, *rows) == {"op 113"}


def test_a_pass_of_the_step_before_has_nothing_behind_it_in_this_one() -> None:
    """A mask makes no node, where no optimizer steps and no module is called."""
    table = table_of(
        Row(RowKind.OP, 101, 105, "loss", sequence=1),
        Row(RowKind.BACKWARD, 150, 190, "backward", argument=0),
        Row(RowKind.OP, 201, 205, "matmul", sequence=2),
        Row(RowKind.OP, 206, 207, "mask", sequence=3),
        Row(RowKind.OP, 208, 209, "next", sequence=3),
        Row(RowKind.BACKWARD, 250, 290, "second", argument=1),
    )
    of_row = np.searchsorted([100, 200, 300], table.start_ns, side="right") - 1
    rows = Rows(np.full(len(table), Category.OTHER, np.int8), np.full(len(table), -1))
    found = adopt_outside_ops(table, rows, Steps(np.array([100, 200]), np.array([200, 300]), of_row))
    forward = {name for name in table.names if found.category[place(table, name)] == Category.FORWARD}
    assert forward == {"loss", "matmul", "mask", "next"}
