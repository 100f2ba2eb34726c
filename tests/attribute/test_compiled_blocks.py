"""Models and blocks that share a compiled graph: whose layers each run is of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.compiled.blocks import Moved, bases_of
from gradscope.tables import RowKind

from .hand import Row
from .test_compiled import (
    AX,
    BX,
    GRAPH,
    PATHS,
    A,
    backward,
    fused,
    graph,
    layers,
    run,
)

TWO = ("", "a", "a.p", "a.act", "a.q", "b", "b.p", "b.act", "b.q", "head.1", "head.2")


def moved(*pairs: tuple[str, str]) -> dict[str, str]:
    """Where each layer goes of which another's parameters stand at the place of its own."""
    found = Moved.of([(TWO.index(one), TWO.index(other)) for one, other in pairs], TWO)
    return {} if found.to is None else {TWO[one]: TWO[to] for one, to in found.to.items() if one != to}


def test_names_of_layers_that_begin_alike_are_told_apart() -> None:
    moved = Moved.of((), ("a.1", "a.2", "a.10", "a.1.x", "a.2.x"), 0, 1)
    assert [moved.layer(each) for each in range(5)] == [1, 1, 2, 4, 4]


def test_what_holds_a_shared_weight_stays() -> None:
    paths = ("a", "a.shared", "b")
    assert Moved.of([(1, 1)], paths, 0, 2).layer(1) == 1 and Moved.of((), paths, 0, 2).layer(1) == 2


def test_a_run_outside_of_all_layers_moves_nothing() -> None:
    assert Moved.of((), ("a", "b"), 0, -1).to is None and Moved.of((), ("a", "b"), -1, 1).to is None


def test_blocks_that_lie_in_others_of_the_same_name() -> None:
    paths = ("net.first.h.0.up", "net.first.h.0.down", "net.second.h.0.up", "net.second.h.0.down", "net", "net.first")
    paths += ("net.second", "net.first.h", "net.second.h", "net.first.h.0", "net.second.h.0")
    moved = Moved.of([(1, 3)], paths)
    assert [moved.layer(0), moved.layer(1)] == [2, 3]


def test_a_layer_is_that_whose_parameters_stand_at_its_place() -> None:
    """And what lies beside it goes with it, whatever is frozen, shared, or of other models."""
    tower = {"a": "b", "a.p": "b.p", "a.act": "b.act", "a.q": "b.q"}
    assert moved(("a.p", "b.p"), ("a.q", "b.q")) == tower == moved(("a.q", "b.q"))
    assert moved(("a.p", "a.p"), ("a.q", "b.q")) == {path: to for path, to in tower.items() if path != "a.p"}
    assert moved(("head.1", "head.2")) == {"head.1": "head.2"}
    assert moved(("a.q", "b.q"), ("head.1", "head.2")) == tower | {"head.1": "head.2"}
    assert moved(("a.p", "a.q")) == {"a.p": "a.q"}  # two layers of one size
    assert moved(("a.p", "a.p")) == moved() == {}
    assert moved(("a.q", "a.q"), ("a.q", "b.q")) == tower == moved(("a.q", "b.q"), ("a.q", "a.q"))  # a weight is tied


def called(start: int, number: int, sequence: int) -> list[Row]:
    """A compiled function that makes a node."""
    return [
        Row(RowKind.OP, start, start + 20, "CompiledFunction", sequence=sequence),
        Row(RowKind.GRAPH, start + 5, start + 15, GRAPH, argument=number),
        Row(RowKind.OP, start + 5, start + 15, "cpp_1"),
    ]


def test_backward_is_of_the_model_whose_forward_made_its_node() -> None:
    """Though it is run with no parameter: of one layer, say, whose input needs no gradient."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    forward = replace(graph(nodes, cpp_1="p"), moved=((AX, AX),))
    other = replace(graph(nodes, cpp_1="p"), moved=((AX, BX),))
    graphs = {0: forward, 1: other, 2: replace(graph(nodes, cpp_1="p"), inputs=("tangents_1",))}
    rows = [*called(10, 0, 5), *called(40, 1, 6)]
    passes = [*backward(1000, 6, ("cpp_1", 70), number=2), *backward(2000, 5, ("cpp_1", 30), number=2)]
    found = run(graphs, *rows, *passes)
    assert layers(found) == {"a.x": 30, "b.x": 70}
    flops = {row.path: (row.forward_flops, row.backward_flops) for row in found.layers if row.flops}
    assert flops == {"a.x": (7, 7), "b.x": (7, 7)}


def test_what_a_checkpoint_runs_again_in_the_node_of_another_is_its_own() -> None:
    """Two functions in one checkpoint: the second's node runs both, and makes the node of the first's backward."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    first = replace(graph(nodes, cpp_1="p"), moved=((AX, AX),))
    second = replace(graph(nodes, cpp_1="p"), moved=((AX, BX),))
    graphs = {0: first, 1: second, 2: replace(graph(nodes, cpp_1="p"), inputs=("tangents_1",))}
    again = [
        Row(RowKind.BACKWARD, 1000, 1300, "backward", argument=0),
        Row(RowKind.NODE, 1000, 1100, "CompiledFunctionBackward", sequence=6, forward_thread=1),
        *called(1010, 0, 7),
        *called(1040, 1, 8),
        Row(RowKind.GRAPH, 1070, 1100, GRAPH, argument=2),
        Row(RowKind.OP, 1070, 1100, "cpp_1"),
        Row(RowKind.NODE, 1200, 1300, "CompiledFunctionBackward", sequence=7, forward_thread=1),
        Row(RowKind.GRAPH, 1200, 1300, GRAPH, argument=2),
        Row(RowKind.OP, 1200, 1300, "cpp_1"),
    ]
    found = run(graphs, *called(10, 0, 5), *called(40, 1, 6), *again)
    flops = {row.path: (row.forward_flops, row.backward_flops) for row in found.layers if row.flops}
    assert flops == {"a.x": (7, 14), "b.x": (7, 14)}
    assert layers(found) == {"": 50, "a.x": 110, "b.x": 40}  # the rest is what Python and the engine do


def test_of_blocks_in_blocks_the_inmost_tells_where_a_layer_lies() -> None:
    """A model whose inner part is of a third one: what has no parameters goes with the part that it is in."""
    paths = ("a", "a.p", "a.in", "a.in.q", "a.in.act", "b", "b.p", "b.in", "b.in.act", "c", "c.q", "c.act")
    index = {path: number for number, path in enumerate(paths)}
    found = Moved.of([(index["a.p"], index["b.p"]), (index["a.in.q"], index["c.q"])], paths)
    assert found.layer(index["a.in.act"]) == index["c.act"]


def test_a_graph_was_compiled_in_the_inmost_of_the_layers_that_its_nodes_lie_in() -> None:
    nodes = {"x": fused(-1), "p": fused(AX, "x")}
    numbers, callers = np.array([0, 0, 0]), np.array([PATHS.index(path) for path in ("", "a", "b")])
    for order in ([0, 1, 2], [2, 1, 0]):
        assert bases_of({0: graph(nodes, cpp_1="p")}, numbers, callers[order], PATHS) == {0: A}


@pytest.mark.parametrize(
    ("pair", "base", "caller", "expected"),
    [
        (("a.p", "b.q"), "", "", "b.q"),  # the same layer calls it
        (("a.p", "a.q"), "a", "b", "a.q"),  # another one does, for a part of the first
        (("a.p", "b.q"), "a", "b", "b.q"),
        (("a.p", "b.q"), "", "b", "b.q"),  # a part of a model, behind the model itself
    ],
)
def test_parameters_tell_for_which_part_of_what_calls_it_a_function_runs(
    pair: tuple[str, str], base: str, caller: str, expected: str
) -> None:
    found = Moved.of([(TWO.index(pair[0]), TWO.index(pair[1]))], TWO, TWO.index(base), TWO.index(caller))
    assert TWO[found.layer(TWO.index(pair[0])) or 0] == expected


def test_what_has_no_parameters_lies_below_what_calls_the_graph() -> None:
    paths = ("", "act", "block", "block.act", "block.other")
    found = Moved.of((), paths, 0, 2)
    assert [found.layer(each) for each in range(2)] == [2, 3]
    assert Moved.of((), ("", "act", "block"), 0, 2).layer(1) == 2


def test_a_node_that_another_thread_runs_is_of_what_the_thread_made_that_made_it() -> None:
    """On a device backward has a thread of its own: numbers are the makers'."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    forward = replace(graph(nodes, cpp_1="p"), moved=((AX, BX),))
    graphs = {0: forward, 1: replace(graph(nodes, cpp_1="p"), inputs=("tangents_1",))}
    passed = [
        Row(RowKind.BACKWARD, 1000, 1100, "backward", argument=0),
        Row(RowKind.NODE, 1000, 1100, "CompiledFunctionBackward", sequence=5, thread=2, forward_thread=1),
        Row(RowKind.GRAPH, 1000, 1100, GRAPH, argument=1, thread=2),
        Row(RowKind.OP, 1000, 1100, "cpp_1", thread=2),
    ]
    found = run(graphs, *called(10, 0, 5), *passed)
    assert {row.path: row.backward_flops for row in found.layers if row.backward_flops} == {"b.x": 7}


def test_a_function_for_a_model_and_for_a_part_of_it_of_the_same_form() -> None:
    """Called for both: what has no parameters lies beside what has, whether or not there is a layer around these."""
    paths = ("", "p", "act", "sub", "sub.p", "sub.act")
    found = Moved.of([(paths.index("p"), paths.index("sub.p"))], paths)
    assert [found.layer(number) for number in range(len(paths))] == [3, 4, 5, 3, 4, 5]
