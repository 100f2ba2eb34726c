"""Replays the backward passes of the timed steps over their graphs: whose each AccumulateGrad and gradient sum is.

The engine runs an AccumulateGrad as soon as its last gradient has arrived, before any other node: the rows that follow
a node are the parameters that it was the last to reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradscope.attribute.nodes import UNKNOWN, innermost_pass_of, nearest
from gradscope.attribute.rows import Skeleton, is_module_hook
from gradscope.tables import EventTable, GraphNode, IntColumn, PassGraph, PassNote, RowKind

_UNNOTED = PassNote(-1, -1)
_ITSELF = -1  # in the place of a node that was added for: not known which, or held by no layer


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
    # they were for. Where that is not known it is the number of the row's own node.
    receivers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Rows of nodes of passes that made other sums than their graph says: it is that of a pass that was wired otherwise.
    misfits: frozenset[int] = frozenset()
    misfit_passes: int = 0


def replay(skeleton: Skeleton, passes: Passes) -> Replayed:
    """Find the parameter of every AccumulateGrad, and what each gradient sum was for."""
    table, nodes = skeleton.table, skeleton.nodes
    found = Replayed(np.zeros(len(nodes.row), np.int64), np.full(len(nodes.row), UNKNOWN, np.int64))
    window = innermost_pass_of(table, nodes.row)
    order = np.argsort(window, kind="stable")
    bounds = np.flatnonzero(np.diff(window[order])) + 1
    is_leaf = table.kind[nodes.row] == RowKind.ACCUMULATE
    sums = _sums_of_engine(skeleton)
    misfits: set[int] = set()
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
        rows = nodes.row[places].tolist()
        if not note.own and any(
            sums[row] > len(targets) and _ITSELF not in targets for row, targets in zip(rows, added, strict=True)
        ):
            misfits.update(rows)
            found.misfit_passes += 1
            continue
        found.covered[places] = 1
        leaves = is_leaf[places]
        owners = [_owner(passes, note, parameters[index]) for index in np.flatnonzero(leaves).tolist()]
        found.accumulate_owner[places[leaves]] = owners
        graph = passes.graphs[note.graph].nodes
        for index, targets in enumerate(added):
            if not targets or leaves[index]:
                continue
            own = int(sequence[index])
            found.receivers[rows[index]] = tuple(
                own if target == _ITSELF else _receiver(passes, note, graph[target], own) for target in targets
            )
    found.misfits = frozenset(misfits)
    noted = [passes.notes[number] if 0 <= number < len(passes.notes) else _UNNOTED for number in window.tolist()]
    for place, parameter in _marked_places(table, nodes.row):
        # A mark knows better than the graph, and is all there is where the graph was too deep to be noted.
        found.covered[place] = 1
        found.accumulate_owner[place] = _owner(passes, noted[place], parameter)
    return found


def _sums_of_engine(skeleton: Skeleton) -> Counter[int]:
    """Return how many gradients were added behind each node; none for hooks of modules, which may add themselves."""
    above = skeleton.table.parent[skeleton.sums].astype(np.int64)
    return Counter(above[~is_module_hook(skeleton.table, above)].tolist())


def _owner(passes: Passes, note: PassNote, parameter: int) -> int:
    """Layer of a leaf; UNKNOWN for one of a nested pass that no layer holds: it is the input of what runs there."""
    owner = passes.owners[parameter] if parameter >= 0 else UNKNOWN
    return UNKNOWN if note.nested and owner < 0 else owner


def _receiver(passes: Passes, note: PassNote, target: GraphNode, own: int) -> int:
    """Return the entry of :attr:`Replayed.receivers` for a row whose node has the number ``own``."""
    if target.parameter < 0:
        return note.base - target.sequence
    owner = _owner(passes, note, target.parameter)
    return own if owner == UNKNOWN else -2 - owner


def _marked_places(table: EventTable, rows: IntColumn) -> list[tuple[int, int]]:
    """Return the places in ``rows`` of the ACCUMULATE rows that were marked, and the index of the parameter of each."""
    marks = np.flatnonzero(table.kind == RowKind.PARAMETER)
    around = nearest(table, table.parent[marks].astype(np.int64), (RowKind.ACCUMULATE,))
    marked = dict(zip(around.tolist(), table.argument[marks].tolist(), strict=True))
    return [(place, marked[int(rows[place])]) for place in np.flatnonzero(np.isin(rows, around)).tolist()]


def _run(graph: PassGraph, executed: list[int], names: list[str]) -> tuple[list[tuple[int, ...]], list[int]]:
    """``(added, parameters)`` of each row: the targets whose second gradient it delivered; what it accumulates into."""
    finder = _NodeFinder(graph)
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
        index = finder.find(number, name)
        ready.clear()
        targets = [_ITSELF] if index == _ONE_OF_SEVERAL else []
        for target, place in graph.nodes[index].edges if index >= 0 else ():
            if target < 0:
                continue
            if (target, place) in arrived:
                targets.append(target)
            arrived.add((target, place))
            finder.waiting[target] -= 1
            if finder.waiting[target] == 0 and graph.nodes[target].parameter >= 0:
                ready.append(graph.nodes[target].parameter)
        added.append(tuple(targets))
    return added, parameters


_ONE_OF_SEVERAL = -2
_RAN = -1  # in the place of how many gradients a node waits for


class _NodeFinder:
    """Tells which node of a graph a row ran."""

    def __init__(self, graph: PassGraph) -> None:
        self.waiting = [0] * len(graph.nodes)  # gradients that have not arrived
        self._graph = graph
        self._by_number: dict[int, list[int]] = {}  # several where two threads drew the same number
        for index, node in enumerate(graph.nodes):
            if node.parameter < 0:
                self._by_number.setdefault(node.sequence, []).append(index)
            for target, _ in node.edges:
                if target >= 0:
                    self.waiting[target] += 1

    def find(self, number: int, name: str) -> int:
        """Return the index of the node; -1 for none; ``_ONE_OF_SEVERAL`` where it matters which of some it was."""
        same = self._by_number.get(number, [])
        if len(same) < 2:
            return same[0] if same and self._graph.names[same[0]] == name else -1
        named = [index for index in same if self._graph.names[index] == name]
        # Of several it is one whose gradients have all arrived, and which did not run yet.
        ready = [index for index in named if self.waiting[index] == 0]
        if not named or len({self._leads_to(index) for index in ready}) != 1:
            return _ONE_OF_SEVERAL if named else -1
        self.waiting[ready[0]] = _RAN
        return ready[0]

    def _leads_to(self, index: int) -> tuple[tuple[int, int, str, int], ...]:
        """The same for nodes that can stand for each other: one layer, in two threads."""
        nodes, names = self._graph.nodes, self._graph.names
        return tuple(
            (nodes[target].sequence, nodes[target].parameter, names[target], place) if target >= 0 else (-1, -1, "", -1)
            for target, place in nodes[index].edges
        )
