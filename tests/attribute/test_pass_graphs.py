"""Which node of a noted graph ran, by graphs made by hand: parameters, numbers and passes that share one."""

from __future__ import annotations

import pytest

from gradscope.attribute.nodes import UNKNOWN
from gradscope.attribute.passes import Passes, replay
from gradscope.attribute.rows import read_skeleton
from gradscope.tables import GraphNode, PassGraph, PassNote, RowKind

from .hand import NO_SPANS, Row, table_of


def replayed(rows: list[Row], graphs: list[PassGraph], notes: list[PassNote], owners: list[int]) -> list[int]:
    """Owner of each AccumulateGrad, in order."""
    table = table_of(*rows)
    skeleton = read_skeleton(table, NO_SPANS, [])
    found = replay(skeleton, Passes(graphs, notes, owners))
    accumulate = table.kind[skeleton.nodes.row] == RowKind.ACCUMULATE
    owner: list[int] = found.accumulate_owner[accumulate].tolist()
    return owner


def ran(start: int, name: str, number: int = -1) -> Row:
    """A row of the engine's."""
    if name == "AccumulateGrad":
        return Row(RowKind.ACCUMULATE, start, start + 9, name)
    return Row(RowKind.NODE, start, start + 9, name, sequence=number, forward_thread=1)


def graph_of(*nodes: tuple[str, int, tuple[int, ...]]) -> PassGraph:
    """By (name, number counted back from the base or the parameter, nodes that it hands gradients to)."""
    made = [
        GraphNode(-1, number, ())
        if name == "AccumulateGrad"
        else GraphNode(number, -1, tuple((target, 0) for target in below))
        for name, number, below in nodes
    ]
    return PassGraph(tuple(made), tuple(name for name, _, _ in nodes))


BACKWARD = Row(RowKind.BACKWARD, 0, 100, "backward", argument=0)
TWO = graph_of(
    ("ExpBackward0", 0, (2, 1)), ("SinBackward0", 1, (3,)), ("AccumulateGrad", 0, ()), ("AccumulateGrad", 1, ())
)


def test_a_mark_tells_the_parameter() -> None:
    """The order in which the engine serves several parameters of one node is its own."""
    rows = [BACKWARD, ran(10, "CatBackward0", 5), ran(20, "AccumulateGrad"), ran(30, "AccumulateGrad")]
    graph = graph_of(("CatBackward0", 0, (1, 2)), ("AccumulateGrad", 0, ()), ("AccumulateGrad", 1, ()))
    marks = [Row(RowKind.PARAMETER, 22, 23, "mark", argument=1), Row(RowKind.PARAMETER, 32, 33, "mark", argument=0)]
    assert replayed([*rows, *marks], [graph], [PassNote(0, 5)], [3, 4]) == [4, 3]


def test_a_parameter_that_is_passed_over_is_not_taken_for_the_next() -> None:
    """A pass may be asked for the gradients of some parameters alone."""
    rows = [BACKWARD, ran(10, "ExpBackward0", 5), ran(30, "SinBackward0", 4), ran(40, "AccumulateGrad")]
    assert replayed(rows, [TWO], [PassNote(0, 5)], [7, 8]) == [8]


def test_passes_over_one_graph_may_run_different_parts_of_it() -> None:
    first = [BACKWARD, ran(10, "ExpBackward0", 5), ran(20, "AccumulateGrad"), ran(30, "SinBackward0", 4)]
    second = [
        Row(RowKind.BACKWARD, 200, 300, "backward", argument=1),
        ran(210, "ExpBackward0", 15),
        ran(230, "SinBackward0", 14),
        ran(240, "AccumulateGrad"),
    ]
    assert replayed([*first, *second], [TWO], [PassNote(0, 5), PassNote(0, 15)], [7, 8]) == [7, 8]


@pytest.mark.parametrize("same", [True, False])
def test_a_number_that_names_no_node_tells_nothing(same: bool) -> None:
    """Two threads drew it, or the node of that number is another one."""
    graph = graph_of(
        ("ExpBackward0", 0, (1, 3) if same else (1,)),
        ("SinBackward0", 1, (2,)),
        ("AccumulateGrad", 0, ()),
        *([("SinBackward0", 1, (4,)), ("AccumulateGrad", 1, ())] if same else []),
    )
    first = ran(0, "ExpBackward0", 5)
    rows = [BACKWARD, first, ran(10, "SinBackward0" if same else "CosBackward0", 4), ran(20, "AccumulateGrad")]
    assert replayed(rows, [graph], [PassNote(0, 5)], [7, 8]) == [UNKNOWN]


@pytest.mark.parametrize(("places", "known"), [((0, 0), True), ((0, 1), False)])
def test_nodes_of_one_number_stand_for_each_other_where_they_lead_to_the_same(
    places: tuple[int, int], known: bool
) -> None:
    """To the same input of the same node: else a sum behind one of them may be for the one or for the other."""
    sins = (GraphNode(1, -1, ((3, place), (4, 0))) for place in places)
    nodes = (GraphNode(0, -1, ((1, 0), (2, 0), (4, 0))), *sins, GraphNode(2, -1, ()), GraphNode(3, -1, ()))
    graph = PassGraph(nodes, ("ExpBackward0", "SinBackward0", "SinBackward0", "MulBackward0", "CosBackward0"))
    rows = [BACKWARD, ran(10, "ExpBackward0", 5), ran(20, "SinBackward0", 4)]
    skeleton = read_skeleton(table_of(*rows), NO_SPANS, [])
    (found,) = replay(skeleton, Passes([graph], [PassNote(0, 5)], [])).receivers.values()
    assert found == ((2,) if known else (4,))
