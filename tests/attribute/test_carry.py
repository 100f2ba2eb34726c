"""Gradient sums of hand-made traces go to the receivers that the survey saw."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.attribute.carry import assign
from gradscope.attribute.passes import Passes
from gradscope.attribute.rows import Category, read_skeleton
from gradscope.attribute.survey import Notes, Receiver, keys
from gradscope.tables import EventTable, GraphNode, PassGraph, PassNote, RowKind

from .hand import Row, place, spans, table_of


def trace(sums: int) -> EventTable:
    """One step of two calls; the node of the second adds ``sums`` gradients once its function is done."""
    return table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 10, 20, "first", argument=0),
        Row(RowKind.OP, 12, 18, "aten::mul", sequence=0),
        Row(RowKind.CALL, 30, 40, "second", argument=1),
        Row(RowKind.OP, 32, 38, "aten::exp", sequence=1),
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        Row(RowKind.NODE, 60, 150, "ExpBackward0", sequence=1, forward_thread=1),
        Row(RowKind.OP, 62, 70, "ExpBackward0", sequence=1, forward_thread=1),
        *(Row(RowKind.ADD, 80 + 10 * number, 85 + 10 * number, f"sum {number}") for number in range(sums)),
        Row(RowKind.NODE, 160, 170, "MulBackward0", sequence=0, forward_thread=1),
        Row(RowKind.STEP, 300, 300, "step 1", argument=1),
    )


CALLS = spans((0, 0, 1), (1, 1, 2))


def notes(table: EventTable, *receivers: Receiver) -> Notes:
    """What a survey of the same step says: lines 7 and 8 of the two operations, and who receives the sums."""
    units = [place(table, "aten::mul"), place(table, "aten::exp")]
    exp = int(np.flatnonzero((table.kind == RowKind.NODE) & (table.sequence == 1))[0])
    nodes = [exp, place(table, "MulBackward0")]
    return Notes(
        unit_key=keys(table.names, np.array([0, 1]), table.name[units]),
        unit_line=np.array([7, 8]),
        node_key=keys(table.names, np.array([1, 0]), table.name[nodes]),
        node_line=np.array([8, 7]),
        parameter_owner=np.array([-1, -1]),
        receivers=(receivers, ()),
        flops={},
        shapes={},
    )


def charged(
    table: EventTable, survey: Notes | None, sums: int, passes: Passes | None = None
) -> list[tuple[int, int, int]]:
    """Category, layer and line of each sum."""
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, survey, passes)
    rows = [place(table, f"sum {number}") for number in range(sums)]
    return [(int(found.rows.category[row]), int(found.rows.owner[row]), int(found.line[row])) for row in rows]


SUM, LAYER = int(Category.GRADIENT_SUM), int(Category.LAYER)


def test_each_sum_goes_to_its_own_receiver_in_order() -> None:
    table = trace(2)
    survey = notes(table, Receiver(0, 3), Receiver(1, 4))
    assert charged(table, survey, 2) == [(SUM, 0, 3), (SUM, 1, 4)]


def test_more_sums_than_receivers_go_to_the_last() -> None:
    table = trace(4)
    survey = notes(table, Receiver(1, 4), Receiver(0, 3))
    assert charged(table, survey, 4) == [(SUM, 1, 4), (SUM, 0, 3), (SUM, 0, 3), (SUM, 0, 3)]


def test_a_receiver_outside_of_every_layer_is_none() -> None:
    table = trace(1)
    assert charged(table, notes(table, Receiver(-2, -1)), 1) == [(SUM, -1, -1)]


def test_an_addition_that_the_survey_knows_no_receiver_of_is_the_nodes_own() -> None:
    table = trace(1)
    assert charged(table, notes(table), 1) == [(LAYER, 1, 8)]


def test_without_a_survey_a_sum_stays_with_the_layer_that_delivered_it() -> None:
    assert [entry[:2] for entry in charged(trace(2), None, 2)] == [(SUM, 1), (SUM, 1)]


@pytest.mark.parametrize("surveyed", [True, False])
def test_lines_are_carried_to_operations_and_nodes(surveyed: bool) -> None:
    table = trace(0)
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, notes(table) if surveyed else None)
    lines = {name: int(found.line[place(table, name)]) for name in ("aten::mul", "aten::exp", "MulBackward0")}
    expected = {"aten::mul": 7, "aten::exp": 8, "MulBackward0": 7} if surveyed else dict.fromkeys(lines, -1)
    assert lines == expected
    assert found.notes == ()


@pytest.mark.parametrize("known", [0, -1, None])
def test_a_parameter_belongs_to_the_layer_that_the_survey_knows(known: int | None) -> None:
    """Also where that is none; without a survey to the layer of the node that ran just before."""
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 30, 40, "second", argument=1),
        Row(RowKind.OP, 32, 38, "aten::exp", sequence=1),
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        Row(RowKind.NODE, 60, 80, "ExpBackward0", sequence=1, forward_thread=1),
        Row(RowKind.ACCUMULATE, 90, 110, "AccumulateGrad"),
        Row(RowKind.STEP, 300, 300, "step 1", argument=1),
    )
    rows = [place(table, "ExpBackward0"), place(table, "AccumulateGrad")]
    survey = None
    if known is not None:
        unit = np.array([place(table, "aten::exp")])
        survey = Notes(
            unit_key=keys(table.names, np.array([1]), table.name[unit]),
            unit_line=np.array([8]),
            node_key=keys(table.names, np.array([1, -2]), table.name[rows]),
            node_line=np.array([8, 5]),
            parameter_owner=np.array([-1, known]),
            receivers=((), ()),
            flops={},
            shapes={},
        )
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, survey)
    accumulate = place(table, "AccumulateGrad")
    assert found.rows.category[accumulate] == Category.ACCUMULATE
    assert found.rows.owner[accumulate] == (1 if known is None else known)


@pytest.mark.parametrize("surveyed", [True, False])
def test_where_the_graph_of_the_pass_shows_no_sum_there_is_none(surveyed: bool) -> None:
    """Whatever the survey's step did: an addition is the node's own, or that of a hook on it."""
    table = trace(1)
    graph = PassGraph((GraphNode(0, -1, ((1, 0),)), GraphNode(1, -1, ())), ("ExpBackward0", "MulBackward0"))
    passes = Passes([graph], [PassNote(0, 1, own=True)], [])
    survey = notes(table, Receiver(0, 3)) if surveyed else None
    assert charged(table, survey, 1, passes) == [(LAYER, 1, 8 if surveyed else -1)]


@pytest.mark.parametrize("again", [True, False])
def test_a_recompute_that_a_function_of_pythons_sets_off_has_no_line(again: bool) -> None:
    """What the Function itself calls in its backward has the line that applied it."""
    kind = RowKind.RECOMPUTE if again else RowKind.ANNOTATION
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 10, 20, "first", argument=0),
        Row(RowKind.OP, 12, 18, "Mine", sequence=0),
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        Row(RowKind.NODE, 60, 150, "MineBackward", sequence=0, forward_thread=1),
        Row(kind, 70, 140, "inside"),
        Row(RowKind.CALL, 80, 120, "called", argument=1),
        Row(RowKind.STEP, 300, 300, "step 1", argument=1),
    )
    survey = Notes(
        unit_key=keys(table.names, np.array([0]), table.name[[place(table, "Mine")]]),
        unit_line=np.array([7]),
        node_key=keys(table.names, np.array([0]), table.name[[place(table, "MineBackward")]]),
        node_line=np.array([7]),
        parameter_owner=np.array([-1]),
        receivers=((),),
        flops={},
        shapes={},
    )
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, survey)
    assert int(found.line[place(table, "MineBackward")]) == 7
    assert int(found.line[place(table, "inside")]) == int(found.line[place(table, "called")]) == (-1 if again else 7)
