"""What the rows of hand-made backward passes and optimizers were spent on, and what is run again in them."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.attribute.rows import Category, assign_rows, read_skeleton
from gradscope.tables import EventTable, RowKind

from .hand import NO_SPANS, Row, spans, table_of


def again(*inside: Row, argument: int = 0) -> list[str]:
    """Names of the rows that the function of a node is said to have run again; rows lie between 120 and 280."""
    table = table_of(
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=argument),
        Row(RowKind.NODE, 110, 300, "MineBackward", sequence=0, forward_thread=1),
        Row(RowKind.OP, 115, 290, "MineBackward", sequence=0, forward_thread=1),
        *inside,
    )
    return [table.names[table.name[row]] for row in read_skeleton(table, NO_SPANS, []).recomputed.tolist()]


MINE = Row(RowKind.OP, 120, 130, "Mine", sequence=5)  # ``Function.apply``
OP = Row(RowKind.OP, 140, 150, "aten::exp", sequence=6)
NESTED = Row(RowKind.BACKWARD, 200, 210, "nested", argument=0)


@pytest.mark.parametrize(
    ("inside", "found"),
    [
        ([OP], ["aten::exp"]),
        ([Row(RowKind.OP, 140, 150, "aten::exp")], []),  # draws no number: gradients are off
        ([Row(RowKind.OP, 140, 150, "aten::exp", sequence=0, forward_thread=1)], []),  # has the number of its node
        ([MINE], []),  # draws one also while they are off
        ([MINE, OP], ["Mine", "aten::exp"]),
        ([MINE, NESTED], ["Mine"]),
        ([OP, Row(RowKind.OP, 142, 148, "aten::inside", sequence=6)], ["aten::exp"]),  # the topmost alone
        ([Row(RowKind.RECOMPUTE, 120, 160, "marked"), OP], ["marked"]),
    ],
)
def test_what_a_function_runs_again(inside: list[Row], found: list[str]) -> None:
    assert again(*inside) == found


def test_a_pass_that_builds_a_graph_draws_numbers_everywhere() -> None:
    assert again(OP, argument=1) == []
    assert again(OP, Row(RowKind.BACKWARD, 118, 280, "of its own", argument=1)) == []


def test_what_a_hook_calls_is_not_run_again_by_the_function_behind_it() -> None:
    """It lies in the node, but not in the node's function."""
    hook = Row(RowKind.OP, 111, 114, "aten::clip", sequence=5), Row(RowKind.OP, 112, 113, "aten::mul", sequence=5)
    assert again(*hook) == []


def charged(table: EventTable, *labels: int) -> dict[str, tuple[Category, int]]:
    """Category and owner of each row, by name; ``labels`` are those of the calls."""
    calls = spans(*((label, 0, 0) for label in labels or (0,)))
    outside = tuple("Outside" for label in labels if label < -1)
    skeleton = read_skeleton(table, calls, [-1] * 3, outside)
    nothing = np.empty(0, np.int64)
    rows = assign_rows(skeleton, np.zeros(len(skeleton.nodes.row), np.int64), nothing, nothing)
    found = zip(rows.category.tolist(), rows.owner.tolist(), strict=True)
    return {table.names[name]: (Category(kind), owner) for name, (kind, owner) in zip(table.name, found, strict=True)}


def test_what_is_no_layer_is_recompute_where_it_is_called_in_backward() -> None:
    """A transform that a checkpoint runs again; in forward it is what runs around it."""
    found = charged(
        table_of(
            Row(RowKind.CALL, 0, 10, "in front", argument=0),
            Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
            Row(RowKind.NODE, 110, 300, "MulBackward0", sequence=0, forward_thread=1),
            Row(RowKind.CALL, 120, 150, "again", argument=0),
            Row(RowKind.OP, 130, 140, "inside"),
        ),
        -2,
    )
    assert found["in front"][0] == Category.OTHER
    assert found["again"][0] == found["inside"][0] == Category.RECOMPUTE


def test_gradscopes_own_work_is_no_layers_wherever_it_lies() -> None:
    """A pass that a layer starts in its forward is noted too."""
    rows = Row(RowKind.CALL, 0, 100, "call", argument=0), Row(RowKind.OWN, 10, 20, "own"), Row(RowKind.OP, 30, 40, "op")
    found = charged(table_of(*rows))
    assert found["own"] == (Category.OTHER, -1) and found["op"] == (Category.FORWARD, 0)


def test_communication_of_a_forward_is_the_layers() -> None:
    """Of tensor parallelism; only in backward it has a row of its own."""
    found = charged(
        table_of(
            Row(RowKind.CALL, 0, 50, "call", argument=0),
            Row(RowKind.COMMUNICATION, 10, 20, "in forward"),
            Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
            Row(RowKind.COMMUNICATION, 110, 120, "in backward"),
            Row(RowKind.ACCUMULATE, 200, 300, "AccumulateGrad"),
            Row(RowKind.OPTIMIZER, 210, 290, "optimizer"),
            Row(RowKind.COMMUNICATION, 220, 230, "of the optimizer"),
        )
    )
    assert found["in forward"] == (Category.FORWARD, 0)
    assert found["in backward"] == (Category.COMMUNICATION, -1)
    # Fused into backward it is the optimizer's all the same.
    assert found["optimizer"] == found["of the optimizer"] == (Category.OPTIMIZER, -1)


@pytest.mark.parametrize("closure", [True, False])
def test_only_a_closure_makes_an_optimizers_operations_forward(closure: bool) -> None:
    """One that is differentiable draws numbers too, but starts no pass; nor is what runs in the pass forward."""
    backward = (
        Row(RowKind.BACKWARD, 50, 90, "backward", argument=0),
        Row(RowKind.OP, 52, 55, "in the pass", sequence=8),
        Row(RowKind.NODE, 60, 80, "MulBackward0", sequence=7, forward_thread=1),
        Row(RowKind.OP, 65, 70, "in the node", sequence=9),
    )
    found = charged(
        table_of(
            Row(RowKind.OPTIMIZER, 0, 100, "optimizer"),
            Row(RowKind.OP, 10, 20, "draws", sequence=7),
            Row(RowKind.OP, 30, 40, "does not"),
            *(backward if closure else ()),
        )
    )
    assert found["draws"][0] == (Category.FORWARD if closure else Category.OPTIMIZER)
    assert found["does not"][0] == Category.OPTIMIZER
    assert all(found[row.name][0] != Category.FORWARD for row in backward if closure)


def run_again_by(parents: list[int], own: int, *called: tuple[int, int, int]) -> int:
    """Owner of a recompute in a node of layer ``own``.

    Args:
        parents: of each layer.
        called: layer, begin and end of each call in the recompute, from 130 to 280.
    """
    table = table_of(
        Row(RowKind.CALL, 0, 50, "forward", argument=0),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        Row(RowKind.NODE, 110, 300, "MulBackward0", sequence=0, forward_thread=1),
        Row(RowKind.RECOMPUTE, 120, 290, "again"),
        *(Row(RowKind.CALL, start, end, "called", argument=at) for at, (_, start, end) in enumerate(called, 1)),
    )
    calls = spans((own, 0, 1), *((label, 1, 1) for label, _, _ in called))
    skeleton, nothing = read_skeleton(table, calls, parents), np.empty(0, np.int64)
    rows = assign_rows(skeleton, np.zeros(len(skeleton.nodes.row), np.int64), nothing, nothing)
    return int(rows.owner[table.name == table.names.index("again")][0])


# A root of a block with two parts, and of another block; the last layer is one that both use.
TREE = [-1, 0, 1, 1, 0, 4]


@pytest.mark.parametrize(
    ("own", "called", "owner"),
    [
        (3, [], 3),  # functions alone: the layer whose node it is
        (2, [(2, 130, 140), (3, 150, 160)], 1),  # the block that calls its parts
        (1, [(1, 130, 200), (2, 140, 150)], 0),  # the root calls the block; what that calls is its own
        (3, [(1, 130, 200), (5, 140, 150)], 0),
        (2, [(3, 130, 200), (5, 140, 150)], 1),  # the block calls a part, which uses a layer of another block
        (4, [(2, 130, 140)], 0),  # the node is of another block: of what both are parts
        (2, [(2, 130, 140), (5, 150, 160)], 0),
    ],
)
def test_what_is_run_again_is_of_the_layer_that_calls_it(
    own: int, called: list[tuple[int, int, int]], owner: int
) -> None:
    assert run_again_by(TREE, own, *called) == owner


def test_a_layer_may_be_known_before_the_one_around_it() -> None:
    assert run_again_by([1, -1, 0, 0], 3, (2, 130, 140)) == 0
