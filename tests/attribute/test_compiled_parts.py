"""Whose the parts of compiled kernels are, at the edges of what a graph tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.compiled.blocks import bases_of
from gradscope.attribute.compiled.order import match
from gradscope.attribute.cost_table import own_contribution
from gradscope.attribute.rows import read_skeleton, self_times
from gradscope.attribute.untold import uncounted
from gradscope.tables import RowKind
from tests.attribute.hand import Row, spans, table_of
from tests.attribute.test_compiled import AX, GRAPH, PATHS, ROOT, A, B, backward, fused, graph, layers, run


def test_what_only_a_view_reads_moves_nothing() -> None:
    nodes = {
        "x": fused(-1, size=8),
        "p": fused(A, "x", size=1000),
        "v": fused(A, "p", is_view=True, size=1000),
        "q": fused(A, "v", size=8),
        "r": fused(B, "q", size=8),
    }
    found = run({0: graph(nodes, cpp_fused="p v q r")}, *backward(1000, 5, ("cpp_fused", 400)))
    assert layers(found) == {"a": 200, "b": 200}


def test_a_sum_in_no_layer_is_the_callers_and_a_sum() -> None:
    nodes = {"x": fused(-1), "s": fused(-1, "x", is_sum=True, op="add"), "q": fused(A, "s", size=12)}
    found = run({0: graph(nodes, cpp_1="s q")}, *backward(1000, 5, ("cpp_1", 240)))
    assert (layers(found, "gradient_sum_ns"), layers(found)) == ({"": 80}, {"a": 160})


def test_a_part_that_moves_nothing_beside_one_that_does_takes_nothing() -> None:
    nodes = {"x": fused(-1, size=0), "p": fused(A, "x", size=0), "q": fused(B, "x", size=8)}
    found = run({0: graph(nodes, cpp_1="p q")}, *backward(1000, 5, ("cpp_1", 240)))
    assert layers(found) == {"b": 240}


def test_what_a_caller_computes_of_sizes_that_a_graph_finds_out_is_not_known() -> None:
    nodes = {"x": fused(-1), "p": fused(-1, "x", line=0, again=True, flops=-1), "q": fused(B, "x", again=True, flops=7)}
    rows = [Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0), Row(RowKind.OP, 10, 40, "cpp_1")]
    found = run({0: graph(nodes, cpp_1="p q")}, *rows, calls=((A, 0, 9),))
    assert {row.path: row.forward_flops for row in found.layers if row.path in {"a", "b"}} == {"a": None, "b": 7}


def test_a_compiled_step_of_an_optimizer_in_front_of_backward_is_the_optimizers() -> None:
    """A loop that steps before it computes: the time lies in front of backward, as forward does."""
    step = replace(graph({"x": fused(-1), "p": fused(-1, "x", line=0)}, cpp_1="p"), is_optimizer=True)
    rows = [Row(RowKind.GRAPH, 96, 99, GRAPH, argument=0), Row(RowKind.OP, 96, 98, "cpp_1")]
    found = run({0: step}, *rows, *backward(1000, 5, number=1))
    assert {row.name: row.phase for row in found.ops if row.name == "cpp_1"} == {"cpp_1": "optimizer"}


def test_a_row_from_the_code_around_is_no_kernel_behind_a_generated_one() -> None:
    assert match(["aten::mm", "cpp_1"], ["cpp_1", "extern_kernels.mm"]) == [-1, 0]


def test_what_runs_another_graph_alone_is_not_where_this_one_was_compiled() -> None:
    """A block that uses a layer beside it, and its model runs a graph of its own."""
    graphs = {0: graph({"p": fused(AX), "q": fused(len(PATHS))}), 1: graph({"r": fused(ROOT)})}
    found = bases_of(graphs, np.array([0, 0, 1]), np.array([A, B, ROOT]), (*PATHS, "shared"))
    assert found[0] == A


@pytest.mark.parametrize(("rows", "expected"), [((20,), ((), (A,))), ((105,), ((B,), ())), ((20, 105), ((B,), (A,)))])
def test_products_that_nobody_counted_are_beside_a_graph_or_in_it(
    rows: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    """Below a graph's row they are of kernels whose nodes are not known; what is known has been given to its layers."""
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step", argument=0),
        Row(RowKind.CALL, 1, 95, "call", argument=0),
        Row(RowKind.CALL, 100, 195, "call", argument=1),
        Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0),
        *(Row(RowKind.OP, at, at + 10, "aten::mm") for at in rows),
        Row(RowKind.STEP, 1000, 1000, "step", argument=1),
    )
    assigned = assign(read_skeleton(table, spans((A, 0, 9), (B, 10, 19)), [-1, 0, 1, 0, 3], paths=PATHS), 0, None)
    own, names = own_contribution(assigned, self_times(table))
    layers = run({}).layers
    assert uncounted(assigned, [own], names, layers) == tuple(map(frozenset, expected))


@pytest.mark.parametrize("product", ["aten::mm", "aten::matmul", "aten::_grouped_mm"])
@pytest.mark.parametrize("counted", [False, True])
def test_products_in_a_kernel_that_torch_has_no_formula_for_are_not_none(counted: bool, product: str) -> None:
    """An operation of a library's own, in forward; what backward runs of it does not say what forward computes."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", again=True, flops=8 if counted else 0), "q": fused(B, flops=5)}
    inside = [Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0), Row(RowKind.OP, 10, 40, "own::mm")]
    rows = [*inside, Row(RowKind.OP, 20, 30, product), *backward(1000, 5, ("own::b", 40), number=1)]
    second = graph({"r": fused(B)}, **{"own.b.default": "r"})
    found = run(
        {0: graph(nodes, **{"own.mm.default": "p"}), 1: second}, *rows, Row(RowKind.OP, 1010, 1020, "aten::bmm")
    )
    told = {row.path: row.flops for row in found.layers}
    assert (told["a.x"], told["b"]) == (8 if counted else None, 5)
    assert [note for note in found.notes if "no formula" in note] == [
        "FLOPs of 1 layer are not told, nor of what holds them: torch has no formula for what they compute"
    ][counted:]
