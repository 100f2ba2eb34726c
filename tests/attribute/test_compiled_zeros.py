"""Zeros that backward makes for what a compiled graph returned and nobody used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradscope.attribute.result import Attribution
from gradscope.ops import ZEROS_OF_UNUSED
from gradscope.tables import CompiledGraph, RowKind

from .hand import Row
from .test_compiled import (
    GRAPH,
    A,
    B,
    fused,
    run,
)


def zeros(*ns: int) -> list[tuple[str, int]]:
    return [("aten::zeros", each) for each in ns]


def returned(*unused: str) -> dict[int, CompiledGraph]:
    """A graph of backward that is run with the gradients of a large value of A's and a small one of B's."""
    nodes = {
        "tangents_1": fused(-1, size=400),
        "tangents_2": fused(-1, size=4),
        "p": fused(A, "tangents_1", line=0, op="mul"),
        "q": fused(B, "tangents_2", line=1, op="mul"),
    }
    kernels = (("cpp_1", ("p", "q")),)
    return {0: CompiledGraph(kernels, nodes, inputs=("tangents_1", "tangents_2"), zeros=unused)}


def node(start: int, sequence: int, *rows: tuple[str, int], number: int = 0) -> list[Row]:
    """A pass of one compiled node, in which these run, and the graph where the name is empty."""
    end = start + sum(ns for _, ns in rows)
    found = [
        Row(RowKind.BACKWARD, start, end, "backward", argument=0),
        Row(RowKind.NODE, start, end, "CompiledFunctionBackward", sequence=sequence, forward_thread=1),
    ]
    for name, ns in rows:
        if name:
            found.append(Row(RowKind.OP, start, start + ns, name))
        else:
            found.append(Row(RowKind.GRAPH, start, start + ns, GRAPH, argument=number))
            found.append(Row(RowKind.OP, start, start + ns, "cpp_1"))
        start += ns
    return found


def of_unused(found: Attribution) -> dict[str | None, int]:
    return {row.layer: row.self_ns for row in found.ops if row.name == ZEROS_OF_UNUSED}


@pytest.mark.parametrize(
    ("unused", "made", "expected"),
    [
        (("tangents_2",), (30,), {"b": 30}),  # not of the largest, which is used
        (("tangents_1",), (30,), {"a": 30}),
        (("tangents_1", "tangents_2"), (30, 5), {"a": 30, "b": 5}),  # in their order
        (("tangents_1", "tangents_2"), (30,), {"a": 30}),  # in this step one of them is used
        (("tangents_2", "tangents_1"), (30,), {"a": 30}),  # and what is large takes the time
        (("tangents_1", "tangents_2"), (30, 5, 7), {"a": 42}),
        ((), (30,), {}),  # the program's own
    ],
)
def test_zeros_are_of_the_values_that_nobody_used(
    unused: tuple[str, ...], made: tuple[int, ...], expected: dict[str | None, int]
) -> None:
    found = run(returned(*unused), *node(1000, 5, *zeros(*made), ("", 100)))
    assert of_unused(found) == expected
    lines = {"a": 1, "b": 2}
    assert {(row.line, row.layer) for row in found.lines if row.backward_ns} >= {(lines[x], x) for x in expected if x}
    assert found.ledger.backward_ns == 100 + sum(made)


def test_zeros_behind_a_graph_or_in_another_node_are_not_of_its_values() -> None:
    behind = node(1000, 5, ("", 100), *zeros(30))
    assert of_unused(run(returned("tangents_1"), *behind)) == {}
    elsewhere = node(1000, 5, *zeros(30)), node(3000, 6, ("", 100))
    assert of_unused(run(returned("tangents_1"), *elsewhere[0], *elsewhere[1])) == {}
    inside = node(1000, 5, *zeros(30), ("", 100))
    outer = Row(RowKind.OP, 1000, 1030, "what makes them itself")
    assert of_unused(run(returned("tangents_1"), *inside[:2], outer, *inside[2:])) == {}
    assert of_unused(run(returned("tangents_1"), *behind, *node(3000, 6, ("", 100)))) == {}


def test_zeros_are_of_the_graph_that_follows() -> None:
    """Two in one node, of which the first has no zeros in front."""
    graphs = {0: returned("tangents_1")[0], 1: returned("tangents_2")[0]}
    rows = node(1000, 5, *zeros(30), ("", 100))
    again = [
        Row(RowKind.OP, 1130, 1150, "aten::zeros"),
        Row(RowKind.GRAPH, 1150, 1200, GRAPH, argument=1),
        Row(RowKind.OP, 1150, 1200, "cpp_1"),
    ]
    longer = [replace(row, end=1200) if row.kind in (RowKind.BACKWARD, RowKind.NODE) else row for row in rows]
    assert of_unused(run(graphs, *longer, *again)) == {"a": 30, "b": 20}


def test_zeros_in_front_of_a_graph_of_forward_are_the_programs_own() -> None:
    rows = (
        Row(RowKind.OP, 5, 15, "aten::zeros"),
        Row(RowKind.GRAPH, 15, 80, GRAPH, argument=0),
        Row(RowKind.OP, 15, 80, "cpp_1"),
    )
    assert of_unused(run(returned("tangents_1"), *rows, *node(1000, 5, ("", 100)))) == {}
