"""Replays the backward passes of the timed steps over their graphs: whose each AccumulateGrad and gradient sum is.

The engine runs an AccumulateGrad as soon as its last gradient has arrived, before any other node: the rows that follow
a node are the parameters that it was the last to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradscope.attribute.nodes import UNKNOWN, nearest, pass_of
from gradscope.attribute.rows import Skeleton
from gradscope.tables import EventTable, IntColumn, PassGraph, PassNote, RowKind


@dataclass(frozen=True, slots=True)
class Passes:
    """What was noted of the backward passes while they ran."""

    graphs: Sequence[PassGraph]
    notes: Sequence[PassNote]
    owners: Sequence[int]  # of each parameter the layer that holds it first; -1 for none


@dataclass(slots=True)
class Replayed:
    """By row of ``skeleton.nodes``."""

    covered: IntColumn  # 1 where the pass of the row was noted
    accumulate_owner: IntColumn  # of ACCUMULATE rows; UNKNOWN where the graph does not say
    # Of rows that added gradients: for each, the number of the node or minus two minus the owner of the parameter that
    # they were for.
    receivers: dict[int, tuple[int, ...]] = field(default_factory=dict)


def replay(skeleton: Skeleton, passes: Passes) -> Replayed:
    """Find the parameter of every AccumulateGrad, and what each gradient sum was for."""
    table, nodes = skeleton.table, skeleton.nodes
    found = Replayed(np.zeros(len(nodes.row), np.int64), np.full(len(nodes.row), UNKNOWN, np.int64))
    window = pass_of(table, nodes.row)
    order = np.argsort(window, kind="stable")
    bounds = np.flatnonzero(np.diff(window[order])) + 1
    done: dict[int, tuple[IntColumn, list[tuple[int, ...]], list[int]]] = {}
    for places in np.split(order, bounds) if len(order) else []:
        number = int(window[places[0]])
        if not 0 <= number < len(passes.notes) or passes.notes[number].graph < 0:
            continue
        note = passes.notes[number]
        sequence = nodes.sequence[places]
        executed = np.where(sequence >= 0, note.base - sequence, -1)
        before = done.get(note.graph)
        if before is None or not np.array_equal(before[0], executed):
            names = [table.names[index] for index in table.name[nodes.row[places]].tolist()]
            before = done[note.graph] = (executed, *_run(passes.graphs[note.graph], executed.tolist(), names))
        _, added, parameters = before
        found.covered[places] = 1
        for place, targets, parameter in zip(places.tolist(), added, parameters, strict=True):
            row = int(nodes.row[place])
            if table.kind[row] == RowKind.ACCUMULATE:
                found.accumulate_owner[place] = passes.owners[parameter] if parameter >= 0 else UNKNOWN
            elif targets:
                graph = passes.graphs[note.graph].nodes
                found.receivers[row] = tuple(
                    note.base - graph[target].sequence
                    if graph[target].parameter < 0
                    else -2 - passes.owners[graph[target].parameter]
                    for target in targets
                )
    _fill_marked(found, nodes.row, _marked(table), passes.owners)
    return found


def _fill_marked(found: Replayed, rows: IntColumn, marked: dict[int, int], owners: Sequence[int]) -> None:
    """A mark knows better than the graph, and is all there is where the graph was too deep to be noted."""
    for place in np.flatnonzero(np.isin(rows, list(marked))).tolist():
        found.covered[place] = 1
        found.accumulate_owner[place] = owners[marked[int(rows[place])]]


def _marked(table: EventTable) -> dict[int, int]:
    """ACCUMULATE row -> index of the parameter, where it was marked."""
    marks = np.flatnonzero(table.kind == RowKind.PARAMETER)
    around = nearest(table, table.parent[marks].astype(np.int64), (RowKind.ACCUMULATE,))
    return dict(zip(around.tolist(), table.argument[marks].tolist(), strict=True))


def _run(graph: PassGraph, executed: list[int], names: list[str]) -> tuple[list[tuple[int, ...]], list[int]]:
    """``(added, parameters)`` of each row: the targets whose second gradient it delivered; what it accumulates into."""
    by_number: dict[int, int] = {}
    waiting = [0] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.parameter < 0:
            # Two threads drew the same number: it does not name a node.
            by_number[node.sequence] = -1 if node.sequence in by_number else index
        for target, _ in node.edges:
            if target >= 0:
                waiting[target] += 1
    arrived: set[tuple[int, int]] = set()
    ready: list[int] = []
    added: list[tuple[int, ...]] = []
    parameters: list[int] = []
    for number, name in zip(executed, names, strict=True):
        if number < 0 and name == "AccumulateGrad":
            added.append(())
            parameters.append(ready.pop(0) if ready else -1)
            continue
        parameters.append(-1)
        index = by_number.get(number, -1)
        ready.clear()
        targets: list[int] = []
        if index >= 0 and graph.names[index] == name:
            for target, place in graph.nodes[index].edges:
                if target < 0:
                    continue
                if (target, place) in arrived:
                    targets.append(target)
                arrived.add((target, place))
                waiting[target] -= 1
                if waiting[target] == 0 and graph.nodes[target].parameter >= 0:
                    ready.append(graph.nodes[target].parameter)
        added.append(tuple(targets))
    return added, parameters
