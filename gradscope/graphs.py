"""What was noted of compiled graphs, in the terms of attribution: rows of the layer table and places of lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from gradscope.capture.naming import ModuleNames
from gradscope.capture.survey import user_line
from gradscope.tables import CalledFrom, CompiledGraph, FusedNode, GraphNote, GraphRun, LineInfo, NodeNote
from gradscope.tree import join


class Watched(Protocol):
    """What was noted of the graphs that Inductor compiled."""

    graphs: list[GraphNote]
    runs: list[GraphRun]
    first: dict[int, tuple[int, ...]]
    labels: dict[int, int]

    def layers(self, numbers: tuple[int, ...], by_parameter: Mapping[int, int], rows: Sequence[int]) -> tuple[int, ...]:
        """Of parameters, by number, the row of the layer that held each; -1 for none."""


def graphs_of(watch: Watched, names: ModuleNames, lines: list[LineInfo]) -> dict[int, CompiledGraph]:
    """:func:`compiled_graphs` of all that was noted."""
    held = partial(watch.layers, by_parameter=names.layers_by_parameter(), rows=names.rows)
    modules = {number: names.rows[label] for number, label in watch.labels.items() if 0 <= label < len(names.rows)}
    return compiled_graphs(watch.graphs, watch.runs, watch.first, names, lines, held, modules)


def compiled_graphs(
    notes: Sequence[GraphNote],
    runs: Sequence[GraphRun],
    first: Mapping[int, Sequence[int]],
    names: ModuleNames,
    lines: list[LineInfo],
    held: Callable[[tuple[int, ...]], tuple[int, ...]],
    modules: Mapping[int, int],
) -> dict[int, CompiledGraph]:
    """The graphs by the number of a run, layers by row, lines by their place in ``lines``, which gets what it lacks.

    FLOPs are those of the sizes that a graph was run with; 0 where these do not tell them.

    Args:
        first: of graphs the parameters of the first run, by number.
        held: answers of such numbers which rows the layers have that held the parameters; -1 for none.
        modules: rows of modules that may be gone, by the ids that they had.
    """
    layers, places = _Layers(names, modules), _Lines(lines)
    graphs = [
        {name: FusedNode.of(node, layer, places.line(node)) for name, node, layer in layers.of(note.nodes.items())}
        for note in notes
    ]
    found = {}
    for number, ran in enumerate(runs):
        note, nodes = notes[ran.graph], graphs[ran.graph]
        flops = flops_of(ran, notes)
        if flops is None or ran.sizes != note.sizes:
            told = flops or {}  # of branches and loops nothing is, with whatever sizes
            nodes = {name: replace(node, flops=told.get(name, min(node.flops, 0))) for name, node in nodes.items()}
        found[number] = CompiledGraph(
            note.kernels,
            nodes,
            note.inputs,
            note.is_optimizer,
            sized=flops is not None,
            is_pass=note.is_pass,
            zeros=ran.zeros,
            compiled=ran.graph,
            moved=_moved(held(tuple(first.get(ran.graph, ()))), held(ran.parameters)),
        )
    return found


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

    def line(self, node: NodeNote) -> int:
        info = user_line(node.frames)
        if info is None:
            return -1
        if info not in self._place:
            self._place[info] = len(self._lines)
            self._lines.append(info)
        return self._place[info]


class _Layers:
    """The layers of nodes. What stands at a path now may be another module than that which was compiled."""

    def __init__(self, names: ModuleNames, modules: Mapping[int, int]) -> None:
        self._names, self._modules = names, modules
        self._row_of = {info.path: row for row, info in enumerate(names.infos)}

    def of(self, nodes: Iterable[tuple[str, NodeNote]]) -> list[tuple[str, NodeNote, int]]:
        """The nodes of one graph with the row of each; -1 for none."""
        nodes = list(nodes)
        called = {each.module: each for _, node in nodes for each in node.modules}
        # Torch's names begin with where the compiled code has the model from: ``L['self'].blocks.0``.
        known = dict(self._prefix(each) for each in called.values() if self._row(each) >= 0)
        return [(name, node, self._layer(node, known)) for name, node in nodes]

    def _row(self, called: CalledFrom) -> int:
        for rows in (self._names.index, self._modules):
            row = rows.get(called.module, -1)
            # Else another one has its id by now.
            if row >= 0 and self._names.infos[row].class_name == called.class_name:
                return row
        return -1

    def _prefix(self, called: CalledFrom) -> tuple[str, str]:
        """What torch calls the module around one that is known, and its path."""
        torchs, ours = called.path.split("."), self._names.infos[self._row(called)].path.split(".")
        while torchs and ours and torchs[-1] == ours[-1]:
            torchs.pop()
            ours.pop()
        return ".".join(torchs), ".".join(ours)

    def _layer(self, node: NodeNote, known: dict[str, str]) -> int:
        for called in reversed(node.modules):
            row = self._row(called)
            row = row if row >= 0 else self._at_its_place(called, known)
            if row >= 0:
                return row
        return -1

    def _at_its_place(self, called: CalledFrom, known: dict[str, str]) -> int:
        for prefix in sorted(known, key=len, reverse=True):
            if called.path.startswith(prefix + "."):
                row = self._row_of.get(join(known[prefix], called.path[len(prefix) + 1 :]), -1)
                if row >= 0 and self._names.infos[row].class_name == called.class_name:
                    return row
        return -1
