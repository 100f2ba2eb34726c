"""What was noted of compiled graphs, in the terms of attribution: rows of the layer table and places of lines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import nn

from gradscope.capture.naming import ModuleNames
from gradscope.capture.survey import user_line
from gradscope.tables import CalledFrom, CompiledGraph, FusedNode, GraphNote, GraphRun, LineInfo, NodeNote
from gradscope.tree import join


class Watched(Protocol):
    """What was noted of the graphs that Inductor compiled."""

    graphs: list[GraphNote]
    runs: list[GraphRun]
    first: dict[int, tuple[int, ...]]
    places: dict[int, tuple[int, ...]]
    modules: dict[int, dict[int, weakref.ref[nn.Module]]]
    labels: dict[int, dict[int, int]]

    def layers(self, numbers: tuple[int, ...], by_parameter: Mapping[int, int], rows: Sequence[int]) -> tuple[int, ...]:
        """Of parameters, by number, the row of the layer that held each; -1 for none."""


def graphs_of(watch: Watched, names: ModuleNames, lines: list[LineInfo]) -> dict[int, CompiledGraph]:
    """:func:`compiled_graphs` of all that was noted."""
    held = partial(watch.layers, by_parameter=names.layers_by_parameter(), rows=names.rows)
    count = range(len(watch.graphs))
    known = [_rows(watch.modules.get(number, {}), watch.labels.get(number, {}), names) for number in count]
    return compiled_graphs(watch.graphs, watch.runs, watch.first, watch.places, names, lines, held, known)


def _rows(
    modules: Mapping[int, weakref.ref[nn.Module]], labels: Mapping[int, int], names: ModuleNames
) -> dict[int, int]:
    """Rows of the modules that a graph is of, by the ids that they had when it was compiled."""
    found = {number: names.rows[label] for number, label in labels.items() if 0 <= label < len(names.rows)}
    living = (number for number, reference in modules.items() if reference() is not None)
    return found | {number: names.index[number] for number in living if number in names.index}


def compiled_graphs(
    notes: Sequence[GraphNote],
    runs: Sequence[GraphRun],
    first: Mapping[int, Sequence[int]],
    places: Mapping[int, Sequence[int]],
    names: ModuleNames,
    lines: list[LineInfo],
    held: Callable[[tuple[int, ...]], tuple[int, ...]],
    modules: Sequence[Mapping[int, int]],
) -> dict[int, CompiledGraph]:
    """The graphs by the number of a run, layers by row, lines by their place in ``lines``, which gets what it lacks.

    FLOPs are those of the sizes that a graph was run with; 0 where these do not tell them.

    Args:
        first: of graphs the parameters of the first run, by number.
        places: of graphs the inputs that these parameters are.
        held: answers of such numbers which rows the layers have that held the parameters; -1 for none.
        modules: of each graph the rows of the modules that it is of, by the ids that these had.
    """
    layers, from_lines = _Layers(names), _Lines(lines)
    at_first = [_known(held, first.get(graph, ()), graph, runs) for graph in range(len(notes))]
    graphs = []
    for graph, note in enumerate(notes):
        holders = {note.inputs[place]: row for place, row in zip(places.get(graph, ()), at_first[graph], strict=False)}
        found = layers.of(note.nodes.items(), modules[graph], holders)
        graphs.append({name: FusedNode.of(node, layer, from_lines.line(node.frames)) for name, node, layer in found})
    made = {}
    for number, ran in enumerate(runs):
        note, nodes = notes[ran.graph], graphs[ran.graph]
        flops = flops_of(ran, notes)
        if flops is None or ran.sizes != note.sizes:
            told = flops or {}  # of branches and loops nothing is, with whatever sizes
            nodes = {name: replace(node, flops=told.get(name, min(node.flops, 0))) for name, node in nodes.items()}
        made[number] = CompiledGraph(
            note.kernels,
            nodes,
            note.inputs,
            note.is_optimizer,
            sized=flops is not None,
            is_pass=note.is_pass,
            zeros=ran.zeros,
            compiled=ran.graph,
            moved=_moved(at_first[ran.graph], held(ran.parameters)),
            line=-1 if ran.called_from is None else from_lines.line([ran.called_from]),
        )
    return made


def _known(
    held: Callable[[tuple[int, ...]], tuple[int, ...]], first: Sequence[int], graph: int, runs: Sequence[GraphRun]
) -> tuple[int, ...]:
    """The layers that a graph was compiled with; of a model that is gone, those that it ran with first."""
    ran = (held(run.parameters) for run in runs if run.graph == graph)
    return next((rows for rows in (held(tuple(first)), *ran) if max(rows, default=-1) >= 0), ())


def _moved(first: Sequence[int], now: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Layers whose parameters a graph was compiled with, each with that whose stand at the same places of a run."""
    if len(first) != len(now):
        return ()
    pairs = [pair for pair in zip(first, now, strict=True) if min(pair) >= 0]
    return tuple(dict.fromkeys(pairs))


def flops_of(ran: GraphRun, notes: Sequence[GraphNote]) -> Mapping[str, int] | None:
    """The floating-point operations of a run's nodes; None where its sizes do not tell them."""
    note = notes[ran.graph]
    if ran.sizes == note.sizes:
        return {name: node.flops for name, node in note.nodes.items()}
    return None if note.flops_at is None else note.flops_at(ran.sizes)


class _Lines:
    def __init__(self, lines: list[LineInfo]) -> None:
        self._lines, self._place = lines, {info: number for number, info in enumerate(lines)}

    def line(self, frames: Sequence[tuple[str, int, str]]) -> int:
        info = user_line(frames)
        if info is None:
            return -1
        if info not in self._place:
            self._place[info] = len(self._lines)
            self._lines.append(info)
        return self._place[info]


class _Layers:
    """The layers of nodes. What stands at a path now may be another module than that which was compiled."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._row_of = {info.path: row for row, info in enumerate(names.infos)}

    def of(
        self, nodes: Iterable[tuple[str, NodeNote]], rows: Mapping[int, int], holders: Mapping[str, int]
    ) -> list[tuple[str, NodeNote, int]]:
        """The nodes of one graph with the row of each; -1 for none.

        Args:
            rows: of the modules that it is of, by the ids that these had.
            holders: rows of the layers that hold the parameters that it is run with, by the inputs' names.
        """
        nodes = list(nodes)
        called = {each.module: each for _, node in nodes for each in node.modules}
        # Torch's names begin with where the compiled code has the model from: ``L['self'].blocks.0``.
        known = dict(self._prefix(each, row) for each in called.values() if (row := self._row(each, rows)) >= 0)
        if not known:  # of a model that is gone: another one's parameters are at the places of its
            used = ((node.modules[-1], name) for _, node in nodes if node.modules for name in node.inputs)
            held = ((each, holders[name]) for each, name in used if holders.get(name, -1) >= 0)
            known = dict(self._prefix(each, row) for each, row in held if self._is_of_class(row, each))
        return [(name, node, self._layer(node, rows, known)) for name, node in nodes]

    def _is_of_class(self, row: int, called: CalledFrom) -> bool:
        return self._names.infos[row].class_name == called.class_name

    def _row(self, called: CalledFrom, rows: Mapping[int, int]) -> int:
        row = rows.get(called.module, -1)
        return row if row >= 0 and self._is_of_class(row, called) else -1

    def _prefix(self, called: CalledFrom, row: int) -> tuple[str, str]:
        """What torch calls the module around one that is known, and its path."""
        torchs, ours = called.path.split("."), self._names.infos[row].path.split(".")
        while torchs and ours and torchs[-1] == ours[-1]:
            torchs.pop()
            ours.pop()
        return ".".join(torchs), ".".join(ours)

    def _layer(self, node: NodeNote, rows: Mapping[int, int], known: dict[str, str]) -> int:
        for called in reversed(node.modules):
            row = self._row(called, rows)
            row = row if row >= 0 else self._at_its_place(called, known)
            if row >= 0:
                return row
        return -1

    def _at_its_place(self, called: CalledFrom, known: dict[str, str]) -> int:
        for prefix in sorted(known, key=len, reverse=True):
            if called.path == prefix or called.path.startswith(prefix + "."):
                row = self._row_of.get(join(known[prefix], called.path[len(prefix) + 1 :]), -1)
                if row >= 0 and self._is_of_class(row, called):
                    return row
        return -1
