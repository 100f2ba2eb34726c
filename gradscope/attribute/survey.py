"""Reads the survey step into notes by position, and carries them over to the timed steps.

A step that does the same thing twice runs the same ops and the same nodes in the same order, so note *k* of the survey
belongs to op or node *k* of a timed step. The names are compared; where they differ, lines are told call by call
(``linematch``), and what else the survey knows goes by occurrence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gradscope.attribute.linechoice import LayerCall
from gradscope.attribute.linematch import LineMatcher, Traced, calls_made, operations_of
from gradscope.attribute.nodes import OUTSIDE, NodeLabels, above_lines, label_nodes, nearest, pass_of
from gradscope.attribute.rows import BoolColumn, Category, NodeRows, Rows, Skeleton, assign_rows, find_steps
from gradscope.ops import CACHE_LOOKUP
from gradscope.tables import (
    EventTable,
    GraphNode,
    Int8Column,
    Int32Column,
    IntColumn,
    ParameterInfo,
    RowKind,
    SpanTable,
)

NO_LINE = -1
_RANGE_CALLS = ("profiler::_record_function_", "PythonDispatchMode")
_TRANSPARENT = (
    RowKind.CALL,
    RowKind.ANNOTATION,
    RowKind.GRAPH,
    RowKind.SHARDING,
    RowKind.BACKWARD,
    RowKind.STEP,
    RowKind.RECOMPUTE,
)


@dataclass(frozen=True, slots=True)
class SurveyInput:
    """The survey's trace and the notes that were taken in Python while it ran."""

    skeleton: Skeleton
    line_spans: SpanTable
    graphs: Sequence[tuple[GraphNode, ...]]
    parameters: Sequence[ParameterInfo]


class Receiver(NamedTuple):
    """The value that a gradient was added for: the layer and the line that produced it."""

    owner: int
    line: int


@dataclass(frozen=True, slots=True)
class Notes:
    """What the survey knows of one step, by position. ``*_key`` are (owner, name) pairs, names as text."""

    unit_key: tuple[tuple[int, str], ...]
    unit_line: IntColumn
    node_key: tuple[tuple[int, str], ...]
    node_line: IntColumn
    parameter_owner: IntColumn  # of each node that is an ACCUMULATE; OUTSIDE for the others
    receivers: tuple[tuple[Receiver, ...], ...]  # of each node: the values whose gradients it added to, in order
    flops: dict[tuple[int, int], int]  # (layer, category) -> floating-point operations of the step
    shapes: dict[tuple[int, int, str], str]  # (layer, category, op) -> most frequent shapes
    # Where operations were counted: forward calls of each layer, and those that backward follows.
    calls: dict[int, int] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    elsewhere: bool = False  # calls of layers ran in other threads
    called: tuple[LayerCall, ...] | None = None  # each module call of the step, in order; None: not noted
    matcher: LineMatcher | None = None  # of steps that ran something else; None: they have no lines
    graphs_known: bool = True  # False where one was too deep to be walked


def read_survey(survey: SurveyInput) -> Notes:
    """Turn the survey's trace into notes by position."""
    skeleton = survey.skeleton
    table, nodes = skeleton.table, skeleton.nodes
    parameter = _parameter_of_accumulate(table, nodes)
    owners = [info.owners[0] if info.owners else OUTSIDE for info in survey.parameters]
    parameter_owner = np.array([owners[index] if index >= 0 else OUTSIDE for index in parameter], np.int64)
    node_line = _line_of_nodes(skeleton, survey.line_spans)
    receivers = _receivers(survey, owners, node_line)
    rows = assign_rows(skeleton, parameter_owner, np.empty(0, np.int64), np.empty(0, np.int64))
    units = unit_rows(skeleton)
    unit_key = keys(table.names, rows.owner[units], table.name[units])
    unit_line = _line_of_units(table, units, survey.line_spans)
    calls = np.flatnonzero(table.kind == RowKind.CALL)
    counted = _in_counted_threads(table)
    return Notes(
        unit_key=unit_key,
        unit_line=unit_line,
        called=calls_made(skeleton, calls),
        matcher=LineMatcher(lambda: [Traced(operations_of(skeleton, units, unit_key, calls), unit_line)]),
        node_key=keys(table.names, nodes.owner, table.name[nodes.row]),
        node_line=node_line,
        parameter_owner=parameter_owner,
        receivers=receivers,
        flops=_flops(table, rows),
        calls=_calls(skeleton, counted & (rows.category == Category.FORWARD)),
        elsewhere=bool(_calls(skeleton, ~counted & (rows.category == Category.FORWARD))),
        trained=_calls(skeleton, is_trained(skeleton, rows.category, counted)),
        shapes=shapes_of(table, rows),
        graphs_known=all(survey.graphs),
    )


def traced_steps(survey: SurveyInput, line_of: IntColumn) -> Iterator[Traced]:
    """The operations of each step of a trace that was taken line by line, cut at its markers.

    Args:
        line_of: number of each line of ``survey.line_spans`` among those that all notes share.
    """
    skeleton = survey.skeleton
    table = skeleton.table
    steps = find_steps(skeleton, 0, at_markers=True)
    nowhere = np.empty(0, np.int64)
    rows = assign_rows(skeleton, np.full(len(skeleton.nodes.row), OUTSIDE), nowhere, nowhere)
    units = unit_rows(skeleton)
    line = _line_of_units(table, units, survey.line_spans)
    line = np.where(line >= 0, line_of[line], NO_LINE)
    for step in range(len(steps)):
        mine = steps.of_row[units] == step
        calls = np.flatnonzero((table.kind == RowKind.CALL) & (steps.of_row == step))
        key = keys(table.names, rows.owner[units[mine]], table.name[units[mine]])
        yield Traced(operations_of(skeleton, units[mine], key, calls), line[mine])


def unit_rows(skeleton: Skeleton) -> IntColumn:
    """Return the ops that user code or a module called itself: no op and no node between them and the Python code."""
    table = skeleton.table
    # The calls behind a record_function have rows under the survey's dispatch mode only.
    is_range = np.array([name.startswith(_RANGE_CALLS) for name in table.names], bool)
    wanted = np.isin(table.kind, (RowKind.OP, RowKind.ADD, RowKind.COMMUNICATION)) & ~is_range[table.name]
    rows = np.flatnonzero(wanted)
    above = above_lines(table, rows)
    called = (above < 0) | np.isin(table.kind[above], _TRANSPARENT)
    # A closure that the optimizer calls has gradients on, its own arithmetic has not.
    called |= (table.kind[above] == RowKind.OPTIMIZER) & (table.sequence[rows] >= 0)
    # Checkpointing calls them from inside a node's function, but it is user code all the same.
    called |= np.isin(rows, skeleton.recomputed)
    return rows[called]


# The survey's dispatch mode makes reshape take another way to the same view.
_SAME = {"ReshapeAliasBackward0": "ViewBackward0"}


def keys(names: Sequence[str], owner: IntColumn, name: Int32Column) -> tuple[tuple[int, str], ...]:
    """Return (owner, name) of each row, by which the rows of two traces are compared."""
    texts = [_SAME.get(text, text) for text in names]
    return tuple((own, texts[index]) for own, index in zip(owner.tolist(), name.tolist(), strict=True))


def _line_of_units(table: EventTable, units: IntColumn, spans: SpanTable) -> IntColumn:
    around = nearest(table, table.parent[units].astype(np.int64), (RowKind.LINE, RowKind.CALL))
    line = np.full(len(units), NO_LINE, np.int64)
    inside = (around >= 0) & (table.kind[around] == RowKind.LINE)
    line[inside] = spans.label[table.argument[around[inside]]]
    return line


def _line_of_nodes(skeleton: Skeleton, spans: SpanTable) -> IntColumn:
    table, nodes = skeleton.table, skeleton.nodes
    line = np.full(len(nodes.row), NO_LINE, np.int64)
    if not len(spans):
        return line
    numbers = skeleton.numbers
    label = label_nodes(table, numbers, NodeLabels(table, spans, RowKind.LINE), RowKind.LINE, skeleton.in_backward)
    by_row = np.full(len(table), NO_LINE, np.int64)
    by_row[numbers.row] = np.maximum(label, NO_LINE)
    return by_row[nodes.row]


def _parameter_of_accumulate(table: EventTable, nodes: NodeRows) -> list[int]:
    """Return index of the parameter of each ACCUMULATE in ``nodes``, from the marker inside its row; -1 elsewhere."""
    marks = np.flatnonzero(table.kind == RowKind.PARAMETER)
    around = nearest(table, table.parent[marks].astype(np.int64), (RowKind.ACCUMULATE,))
    by_row = dict(zip(around.tolist(), table.argument[marks].tolist(), strict=True))
    return [by_row.get(row, -1) for row in nodes.row.tolist()]


def _receivers(survey: SurveyInput, owners: Sequence[int], node_line: IntColumn) -> tuple[tuple[Receiver, ...], ...]:
    """For each node in the order of execution, the values whose second, third ... gradient it delivered.

    The engine adds a gradient to what has already arrived at the same input of the next node; replaying the arrivals
    over the noted graph tells for which node each addition was.
    """
    table, nodes = survey.skeleton.table, survey.skeleton.nodes
    columns = (nodes.sequence.tolist(), nodes.owner.tolist(), node_line.tolist())
    made_by = {number: Receiver(owner, line) for number, owner, line in zip(*columns, strict=True) if number >= 0}
    nobody = Receiver(OUTSIDE, NO_LINE)
    result: list[tuple[Receiver, ...]] = []
    window = pass_of(table, nodes.row).tolist()
    by_number = [{node.sequence: index for index, node in enumerate(graph)} for graph in survey.graphs]
    arrived: set[tuple[int, int, int]] = set()
    for position, pass_number in enumerate(window):
        sequence = int(nodes.sequence[position])
        if not 0 <= pass_number < len(by_number) or sequence < 0:  # an AccumulateGrad hands nothing on
            result.append(())
            continue
        graph = survey.graphs[pass_number]
        index = by_number[pass_number].get(sequence, -1)
        added: list[Receiver] = []
        for target, number in graph[index].edges if index >= 0 else ():
            if target < 0:
                continue
            key = (pass_number, target, number)
            if key in arrived:
                node = graph[target]
                is_leaf = node.parameter >= 0
                added.append(
                    Receiver(owners[node.parameter], NO_LINE) if is_leaf else made_by.get(node.sequence, nobody)
                )
            arrived.add(key)
        result.append(tuple(added))
    return tuple(result)


def is_trained(skeleton: Skeleton, category: Int8Column, among: BoolColumn | None = None) -> BoolColumn:
    """Check of each row that it is a call of a module of which a node has run in backward, in a row ``among`` some.

    An evaluation has none. Nor has a checkpoint's forward where that is reentrant: there the call is the one that
    backward makes again. One that is not reentrant makes nodes both times, and those of the first run.
    """
    table, ran = skeleton.table, skeleton.numbers
    counts = np.ones(len(ran.row), np.bool_) if among is None else among[ran.row]
    found = (table.kind == RowKind.CALL) & np.isin(category, (Category.FORWARD, Category.RECOMPUTE))
    rows = np.flatnonzero(found)
    call = table.argument[rows]
    for thread in np.unique(table.thread[rows]).tolist():  # each counts by itself
        mine = table.thread[rows] == thread
        sequence = np.unique(ran.sequence[counts & (ran.thread == thread)])
        first, last = skeleton.calls.low[call[mine]], skeleton.calls.high[call[mine]]
        found[rows[mine]] = np.searchsorted(sequence, last) > np.searchsorted(sequence, first)
    return found


def _calls(skeleton: Skeleton, mine: BoolColumn) -> dict[int, int]:
    table = skeleton.table
    calls = np.flatnonzero((table.kind == RowKind.CALL) & mine)
    labels, counts = np.unique(skeleton.calls.label[table.argument[calls]], return_counts=True)
    return dict(zip(labels.tolist(), counts.tolist(), strict=True))


def _in_counted_threads(table: EventTable) -> BoolColumn:
    """Check of each row that its thread is one whose operations are counted: a program may train in others too."""
    threads = np.unique(table.thread[table.kind == RowKind.FLOP])
    return np.isin(table.thread, threads) if len(threads) else np.ones(len(table), np.bool_)


def _flops(table: EventTable, rows: Rows) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = defaultdict(int)
    for row in np.flatnonzero(table.kind == RowKind.FLOP).tolist():
        found[int(rows.owner[row]), int(rows.category[row])] += int(table.argument[row])
    return dict(found)


def shapes_of(table: EventTable, rows: Rows) -> dict[tuple[int, int, str], str]:
    """(layer, category, op) -> its most frequent input shapes; empty where they were not recorded."""
    if table.shapes is None:
        return {}
    counts: dict[tuple[int, int, str], dict[str, int]] = {}
    for row in np.flatnonzero(table.kind <= RowKind.ADD).tolist():
        key = (int(rows.owner[row]), int(rows.category[row]), table.names[table.name[row]])
        texts = counts.setdefault(key, {})
        texts[table.shapes[row]] = texts.get(table.shapes[row], 0) + 1
    best = {key: max(texts, key=lambda text: texts[text]) for key, texts in counts.items()}
    return {key: text for key, text in best.items() if text}


# --------------------------------------------------------------------------------------------------------------------
# Carrying over
# --------------------------------------------------------------------------------------------------------------------


def match_step(
    notes: Notes,
    units: tuple[tuple[int, str], ...],
    nodes: tuple[tuple[int, str], ...],
) -> tuple[list[int], list[int], bool]:
    """Position in the survey of each unit and each node of one step, -1 where there is none, and whether all agree.

    Ops outside of every module may differ: a script logs and evaluates in some steps and not in others.
    """
    unit_places, units_equal = _match(units, notes.unit_key)
    node_places, nodes_equal = _match(nodes, notes.node_key)
    return unit_places, node_places, nodes_equal and (units_equal or _owned(units) == _owned(notes.unit_key))


def _owned(units: tuple[tuple[int, str], ...]) -> list[tuple[int, str]]:
    """Those of modules. With torch 2.11 Dynamo looks for code of gradscope's own functions too, in the survey alone."""
    return [key for key in units if key[0] != OUTSIDE and key[1] != CACHE_LOOKUP]


def _match(timed: tuple[tuple[int, str], ...], known: tuple[tuple[int, str], ...]) -> tuple[list[int], bool]:
    if timed == known:
        return list(range(len(timed))), True
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for position, key in enumerate(known):
        places[key].append(position)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    result = []
    for key in timed:
        candidates = places.get(key)
        if not candidates:
            result.append(-1)
            continue
        result.append(candidates[min(seen[key], len(candidates) - 1)])
        seen[key] += 1
    return result, False
