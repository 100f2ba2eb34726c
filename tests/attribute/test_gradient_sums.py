"""Gradient sums of hand-made traces go to the receivers that the survey saw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign, assign_surveyed
from gradscope.attribute.linechoice import LayerCall
from gradscope.attribute.linematch import LineMatcher
from gradscope.attribute.passes import Passes
from gradscope.attribute.rows import Category, read_skeleton
from gradscope.attribute.survey import Notes, Receiver, keys
from gradscope.tables import EventTable, GraphNode, PassGraph, PassNote, RowKind

from .hand import NO_SPANS, Row, place, spans, table_of


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


def test_a_module_that_is_called_in_no_node_of_a_pass_has_no_line() -> None:
    """By a callback of the engine's, in a pass that a Function of the user's starts in its forward."""
    table = table_of(
        Row(RowKind.STEP, 0, 0, "begin", argument=0),
        Row(RowKind.OP, 12, 98, "Mine", sequence=0),
        Row(RowKind.BACKWARD, 20, 90, "backward", argument=0),
        Row(RowKind.CALL, 30, 80, "called", argument=0),
        Row(RowKind.STEP, 300, 300, "end", argument=1),
    )
    survey = replace(
        notes(trace(0)),
        unit_key=keys(table.names, np.array([-1]), table.name[[place(table, "Mine")]]),
        unit_line=np.array([7]),
    )
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, survey)
    assert [int(found.line[place(table, name)]) for name in ("Mine", "backward", "called")] == [7, 7, -1]


@pytest.mark.parametrize("known", [True, False])
def test_an_operation_that_is_not_told_has_the_line_of_the_node_that_it_runs_in(known: bool) -> None:
    """In a Function of Python's; outside of every node it has none."""
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 10, 40, "first", argument=0),
        Row(RowKind.OP, 12, 18, "Mine", sequence=0),
        Row(RowKind.OP, 20, 30, "other"),
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        Row(RowKind.NODE, 60, 150, "MineBackward", sequence=0, forward_thread=1),
        Row(RowKind.CALL, 80, 120, "called", argument=1),
        Row(RowKind.OP, 90, 110, "inside"),
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
        matcher=LineMatcher(list) if known else None,
    )
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, survey)
    assert [int(found.line[place(table, name)]) for name in ("other", "inside")] == [-1, 7]


def test_a_step_that_called_from_other_instructions_ran_other_lines() -> None:
    """Though its operations are the same: the note says how many of these have a line."""
    table = trace(0)
    calls = replace(CALLS, caller=np.array([5, 6]))
    for callers, told in (((5, 6), 0), ((5, 8), 1)):
        survey = replace(notes(table), called=tuple(map(LayerCall, (0, 1), callers)))
        found = assign(read_skeleton(table, calls, [-1, -1]), 0, survey)
        assert len(found.notes) == told
    more = replace(survey, unit_key=(survey.unit_key[0], (1, "another")))
    (note,) = assign(read_skeleton(table, calls, [-1, -1]), 0, more).notes
    assert note.startswith("1 of 1 steps did not run") and "and 50.0 % of the operations" in note


def test_a_parameter_in_front_of_every_node_is_nobodys() -> None:
    table = table_of(
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        Row(RowKind.ACCUMULATE, 60, 70, "AccumulateGrad"),
        Row(RowKind.NODE, 80, 90, "MulBackward0", sequence=0, forward_thread=1),
    )
    found = assign(read_skeleton(table, CALLS, [-1, -1]), 0, None)
    assert found.rows.owner[place(table, "AccumulateGrad")] == -1


def test_what_receives_a_sum_is_of_the_thread_of_the_node_that_delivers_it() -> None:
    """Both threads have drawn 0 and 1: a pass of the second adds for its own first value."""
    threads = [
        row
        for thread, at in ((1, 10), (2, 20))
        for row in (
            Row(RowKind.CALL, at, at + 3, "call", thread=thread, argument=thread - 1),
            Row(RowKind.OP, at + 1, at + 2, "aten::mul", thread=thread, sequence=0),
        )
    ]

    def ran(start: int, number: int, thread: int) -> Row:
        return Row(RowKind.NODE, start, start + 9, f"N{number}", sequence=number, forward_thread=thread)

    table = table_of(
        *threads,
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        *(ran(110 + 20 * number, 2 - number, 2) for number in range(2)),
        Row(RowKind.ADD, 135, 137, "sum"),
        ran(150, 0, 1),
        ran(170, 0, 2),
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.STEP, 500, 500, "step 1", argument=1),
    )
    graph = PassGraph(
        (GraphNode(0, -1, ((1, 0), (2, 0))), GraphNode(1, -1, ((2, 0),)), GraphNode(2, -1, ())), ("N2", "N1", "N0")
    )
    passes = Passes([graph], [PassNote(0, 2, own=True)], [])
    found = assign(read_skeleton(table, spans((0, 0, 1), (1, 0, 1)), [-1, -1]), 0, None, passes)
    assert int(found.rows.owner[place(table, "sum")]) == 1


def test_the_survey_itself_is_cut_at_its_markers_and_a_nameless_line_is_that_around_it() -> None:
    """What gradscope does behind a marker, in the optimizer's row, is in no step."""
    table = table_of(
        Row(RowKind.OPTIMIZER, 0, 40, "optimizer 0"),
        Row(RowKind.STEP, 10, 10, "step 0", argument=0),
        Row(RowKind.LINE, 50, 90, "line", argument=0),
        Row(RowKind.LINE, 60, 80, "nameless", argument=1),
        Row(RowKind.OPTIMIZER, 100, 140, "optimizer 1"),
        Row(RowKind.STEP, 110, 110, "step 1", argument=1),
    )
    nothing = np.empty(0, np.int64)
    empty = Notes((), nothing, (), nothing, nothing, (), {}, {})
    found = assign_surveyed(read_skeleton(table, NO_SPANS, []), 0, empty, spans((7, 0, 0), (-1, 0, 0)))
    assert (found.steps.start_ns.tolist(), found.steps.end_ns.tolist()) == ([10], [110])
    assert [int(found.line[place(table, name)]) for name in ("line", "nameless", "optimizer 1")] == [7, 7, -1]


@pytest.mark.parametrize("known", [True, False])
def test_where_the_surveys_graph_is_not_known_its_sums_stay_with_who_delivers_them(known: bool) -> None:
    table = trace(1)
    survey = replace(notes(table), graphs_known=known)
    found = assign_surveyed(read_skeleton(table, CALLS, [-1, -1]), 0, survey, NO_SPANS)
    assert int(found.rows.category[place(table, "sum 0")]) == (LAYER if known else SUM)
