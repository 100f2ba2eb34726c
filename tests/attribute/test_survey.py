"""What is read from the trace of a survey made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.rows import Category, read_skeleton
from gradscope.attribute.survey import (
    Notes,
    Receiver,
    SurveyInput,
    keys,
    match_step,
    read_survey,
    traced_steps,
    unit_rows,
)
from gradscope.tables import EventTable, GraphNode, ParameterInfo, RowKind, SpanTable

from .hand import NO_SPANS, Row, spans, table_of

OP = Row(RowKind.OP, 40, 50, "aten::asked", sequence=9)


def surveyed(
    table: EventTable, calls: SpanTable = NO_SPANS, lines: SpanTable = NO_SPANS, *graphs: tuple[GraphNode, ...]
) -> Notes:
    parameters = [ParameterInfo("p", owners) for owners in ((1, 0), ())]
    return read_survey(SurveyInput(read_skeleton(table, calls, [-1, -1]), lines, graphs, parameters))


@pytest.mark.parametrize(
    ("around", "unit"),
    [
        ([], True),
        ([Row(RowKind.CALL, 0, 100, "around", argument=0)], True),
        ([Row(RowKind.ANNOTATION, 0, 100, "record_function")], True),
        ([Row(RowKind.LINE, 0, 100, "around", argument=0), Row(RowKind.ANNOTATION, 1, 99, "record_function")], True),
        ([Row(RowKind.BACKWARD, 0, 100, "around", argument=0)], True),
        ([Row(RowKind.STEP, 0, 100, "around", argument=0)], True),
        ([Row(RowKind.RECOMPUTE, 0, 100, "around")], True),
        ([Row(RowKind.OP, 0, 100, "around")], False),
        ([Row(RowKind.NODE, 0, 100, "MulBackward0", sequence=3, forward_thread=1)], False),
        (
            [  # the function of a node runs it again
                Row(RowKind.BACKWARD, 0, 100, "pass", argument=0),
                Row(RowKind.NODE, 1, 99, "MineBackward", sequence=3, forward_thread=1),
                Row(RowKind.OP, 2, 98, "MineBackward", sequence=3, forward_thread=1),
            ],
            True,
        ),
    ],
)
def test_what_python_calls_itself(around: list[Row], unit: bool) -> None:
    table = table_of(*around, OP)
    found = unit_rows(read_skeleton(table, spans((0, 0, 0)), [-1]))
    assert ("aten::asked" in [table.names[table.name[row]] for row in found]) is unit


def test_the_two_names_of_one_view_are_the_same() -> None:
    one = np.zeros(1, np.int64), np.zeros(1, np.int32)
    assert keys(("ReshapeAliasBackward0",), *one) == keys(("ViewBackward0",), *one) != keys(("MulBackward0",), *one)


def test_a_line_ends_where_another_layer_begins() -> None:
    """What a layer of torch's runs is at no line of the user's."""
    table = table_of(
        Row(RowKind.LINE, 0, 100, "line", argument=0),
        Row(RowKind.OP, 10, 20, "own"),
        Row(RowKind.CALL, 30, 90, "call", argument=0),
        Row(RowKind.OP, 40, 50, "of the layer"),
        Row(RowKind.LINE, 60, 80, "line inside", argument=1),
        Row(RowKind.OP, 65, 70, "inside"),
    )
    assert surveyed(table, spans((0, 0, 0)), spans((7, 0, 0), (8, 0, 0))).unit_line.tolist() == [7, -1, 8]


SUMMED = (
    GraphNode(2, -1, ((1, 0), (2, 0))),
    GraphNode(1, -1, ((2, 0), (3, 0))),
    GraphNode(0, -1, ((3, 0),)),
    GraphNode(-1, 0, ()),
)


def backward(start: int, number: int) -> list[Row]:
    """A pass over nodes 2, 1 and 0: the value of 0 is used by both others, its parameter by 1 and 0."""
    nodes = [
        Row(RowKind.NODE, start + 10 * at, start + 10 * at + 9, "N", sequence=2 - at, forward_thread=1)
        for at in range(3)
    ]
    return [Row(RowKind.BACKWARD, start, start + 60, f"pass {number}", argument=0), *nodes]


@pytest.mark.parametrize("passes", [1, 2])
def test_sums_are_for_the_value_that_was_used_twice_in_the_same_pass(passes: int) -> None:
    table = table_of(
        Row(RowKind.OP, 1, 2, "first", sequence=0),
        Row(RowKind.CALL, 5, 10, "call", argument=0),
        *(row for number in range(passes) for row in backward(100 + 100 * number, number)),
    )
    notes = surveyed(table, spans((0, 0, 1)), NO_SPANS, *[SUMMED] * passes)
    assert notes.receivers == ((), (Receiver(0, -1),), (Receiver(1, -1),)) * passes
    assert notes.graphs_known
    assert not surveyed(table, spans((0, 0, 1)), NO_SPANS, SUMMED, ()).graphs_known


def test_a_sum_for_a_value_whose_node_did_not_run_is_nobodys() -> None:
    rows = [row for row in backward(100, 0) if row.sequence != 0]
    assert surveyed(table_of(*rows), NO_SPANS, NO_SPANS, SUMMED).receivers == ((), (Receiver(-1, -1),))


def test_calls_flops_and_shapes_of_a_layer() -> None:
    """Calls of forward alone; all FLOPs; of the shapes those that it was given most often."""
    table = table_of(
        *(Row(RowKind.CALL, at, at + 9, f"call {at}", argument=0) for at in (0, 10, 20)),
        *(Row(RowKind.OP, at + 1, at + 8, "aten::mm") for at in (0, 10, 20)),
        *(Row(RowKind.FLOP, at + 3, at + 3, "flop", argument=5) for at in (0, 10, 20)),
        Row(RowKind.BACKWARD, 50, 90, "backward", argument=0),
        Row(RowKind.CALL, 60, 70, "again", argument=0),
    )
    shapes = [
        "" if kind != RowKind.OP else ("2x2" if start == 1 else "4x4")
        for kind, start in zip(table.kind, table.start_ns, strict=True)
    ]
    notes = surveyed(replace(table, shapes=shapes), spans((0, 0, 0)))
    forward = int(Category.FORWARD)
    assert notes.calls == {0: 3} and notes.flops == {(0, forward): 15}
    assert notes.shapes == {(0, forward, "aten::mm"): "4x4"}


A, B, LOOSE = (0, "a"), (0, "b"), (-1, "loose")


def known(*unit_key: tuple[int, str]) -> Notes:
    nothing = np.empty(0, np.int64)
    return Notes(unit_key, np.arange(len(unit_key)), (A,), np.zeros(1, np.int64), nothing, ((),), {}, {})


def test_what_runs_in_another_order_or_more_often_goes_by_occurrence() -> None:
    places, nodes, _ = match_step(known(A, B, A), (A, A, B, A, LOOSE), (A, A))
    assert places == [0, 2, 1, 2, -1] and nodes == [0, 0]


@pytest.mark.parametrize(
    ("units", "nodes", "same"),
    [
        ((A, B), (A,), True),
        ((A, LOOSE, B, LOOSE), (A,), True),  # a script logs in some steps
        ((A, (0, "TorchDynamo Cache Lookup"), B), (A,), True),
        ((A, LOOSE, A), (A,), False),
        ((A, B), (B,), False),
    ],
)
def test_only_what_layers_run_must_be_the_same(
    units: tuple[tuple[int, str], ...], nodes: tuple[tuple[int, str], ...], same: bool
) -> None:
    assert match_step(known(A, B, LOOSE), units, nodes)[2] is same


def test_steps_that_are_traced_by_line_end_at_their_markers() -> None:
    """Each with its own calls; what gradscope does behind a marker, in the optimizer's row, is in none."""
    rows = []
    for step in range(3):
        at = 100 * step
        rows += [
            Row(RowKind.OPTIMIZER, at, at + 40, f"optimizer {step}"),
            Row(RowKind.STEP, at + 10, at + 10, f"step {step}", argument=step),
            Row(RowKind.CALL, at + 50, at + 80, f"call {step}", argument=step),
            Row(RowKind.LINE, at + 55, at + 75, f"line {step}", argument=step),
            Row(RowKind.OP, at + 60, at + 70, "op"),
        ]
    skeleton = read_skeleton(table_of(*rows), spans(*[(0, 0, 0)] * 3), [-1])
    steps = list(
        traced_steps(SurveyInput(skeleton, spans((0, 0, 0), (1, 0, 0), (0, 0, 0)), (), ()), np.array([40, 50]))
    )
    assert [step.lines.tolist() for step in steps] == [[40], [50]]
    assert [sorted(step.ran.inside) for step in steps] == [[-1, 0], [-1, 1]]
    assert [len(step.ran.inside[-1]) for step in steps] == [1, 1]
