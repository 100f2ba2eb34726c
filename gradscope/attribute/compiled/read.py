"""Whose the time of compiled code is: Inductor tells of which nodes each kernel is made, and of which layers these are.

A graph writes a row when it runs, with its kernels below it in the order of the generated code, or a device replays
them. A kernel that computes nodes of one layer is that layer's; what several layers were fused into is split between
them, and counted as an estimate.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.compiled.blocks import Moved, bases_of
from gradscope.attribute.compiled.fused import SCALE, Nodes, Share, computed_by, shares_of
from gradscope.attribute.compiled.order import match, match_replay, row_name
from gradscope.attribute.compiled.replays import Launched, rows_below, zeros_beside
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.nodes import OUTSIDE, nearest
from gradscope.attribute.rows import INHERIT, BoolColumn, Category, Rows
from gradscope.attribute.survey import NO_LINE
from gradscope.ops import ZEROS_OF_UNUSED, is_product
from gradscope.tables import CompiledGraph, EventTable, IntColumn, RowKind

_LAST = sys.maxsize


@dataclass(frozen=True, slots=True)
class CompiledTime:
    """What is known of the graphs that ran.

    Attributes:
        of_row: for each row of the trace the kernel that it is or lies in, an index into ``kernels``; -1.
        of_activity: for each of the device's activities, where a CUDA graph replays kernels without rows; else -1.
        begins: those of these activities that are the first of their kernel.
        kernels: of each its shares, for the layer that ran the graph.
        called: of each what it is called where no row names it; empty: by its row.
        op: of each the place of that name; -1. See :func:`with_names`.
        estimated: of each whether it is split between layers.
        regions: how many times graphs ran.
        unmatched: how many of these ran other kernels than they were compiled to.
        flops: of the measured steps, by layer and whether in backward.
        uncounted: layers of graphs that ran with sizes that do not tell their operations.
        unknown: layers of kernels that multiply matrices in a way that torch has no formula for.
        passes_untold: passes of compiled autograd ran operations of which nobody tells the layer.
        readers: of a run, by its number, the layer that ran it and its node's number, the layer and line that read each
            of its inputs: of several the first in forward; None where nothing does.
    """

    of_row: IntColumn
    of_activity: IntColumn
    begins: BoolColumn
    kernels: tuple[tuple[Share, ...], ...]
    called: tuple[str, ...]
    op: IntColumn
    estimated: tuple[bool, ...]
    regions: int
    unmatched: int
    flops: Mapping[tuple[int, bool], int]
    uncounted: frozenset[int]
    unknown: frozenset[int]
    passes_untold: bool
    readers: Mapping[tuple[int, int, int], tuple[tuple[int, int] | None, ...]]

    def inside(self, part: Contribution) -> IntColumn:
        """Of each entry the kernel that it is of; -1."""
        if part.apart is not None:
            return np.full(len(part.row), -1)
        found = self.of_row[part.row]
        if part.kernel is None:
            return found
        activity = self.of_activity[part.kernel]
        return np.where(activity >= 0, activity, found)

    def notes(self) -> list[str]:
        """What the report must say."""
        found = []
        if self.unmatched:
            found.append(
                f"{self.unmatched} of {self.regions} runs of compiled graphs ran other kernels than they were compiled "
                "to: their time stays with the layer that called them"
            )
        if any(layer >= 0 for layer in self.uncounted):
            found.append(
                "FLOPs of layers are not told where a compiled graph finds out while it runs what it computes: sizes, "
                "branches and loops"
            )
        return found


def read_compiled(assigned: Assigned, graphs: Mapping[int, CompiledGraph], paths: Sequence[str]) -> CompiledTime | None:
    """Find the kernels of the graphs that ran; None where none did.

    Args:
        graphs: by number.
        paths: of each layer.
    """
    table = assigned.skeleton.table
    regions = np.flatnonzero(table.kind == RowKind.GRAPH)
    regions = regions[np.isin(table.argument[regions], list(graphs))]
    if not len(regions):
        return None
    callers = assigned.rows.owner[regions]
    bases = bases_of(graphs, table.argument[regions], callers, paths)
    nodes = nearest(table, regions, (RowKind.NODE,))
    telling = _of_forward(table, regions, nodes, graphs)
    known: dict[tuple[int, int, int], _Known] = {}
    flops = Counter[tuple[int, bool]]()
    marked = _Marked(table)
    unmatched, passes_untold = 0, False
    uncounted = set[int]()
    below = rows_below(table, regions)
    launched = Launched.of(assigned, regions, below)
    zeros = zeros_beside(table, regions[assigned.skeleton.in_backward[regions]])
    for region, caller, told in zip(regions.tolist(), callers.tolist(), telling, strict=True):
        number = int(table.argument[region])
        place = number, caller, told
        if place not in known:
            moved = Moved.of(graphs[told].moved, paths, bases.get(number, caller), caller)
            line = graphs[told].line
            known[place] = _Known.of(graphs[number].with_line(line) if line >= 0 else graphs[number], moved)
        here = known[place]
        marked.zeros(zeros.get(region, ()), here.unused)
        children = below.get(region, [])
        rows = match([table.names[table.name[row]] for row in children], here.names)
        activities = launched.activities(region, here.names, with_rows=rows is None)
        replay = match_replay(launched.names(activities), here.names) if activities else None
        measured = assigned.steps.of_row[region] >= 0
        if rows is None and replay is None:
            unmatched += 1
            if measured:
                uncounted |= {caller if layer is None else layer for layer in here.flops}
            continue
        marked.rows(children, rows or [], here)
        marked.activities(activities, replay or [], here)
        if measured:
            backward = bool(assigned.skeleton.in_backward[region])
            for layer, count in here.flops.items():
                flops[caller if layer is None else layer, backward] += count
                passes_untold |= graphs[number].is_pass and caller < 0 and layer is None
    read = {
        (number, caller, told): tuple(
            None if each is None else (caller if each[0] is None else each[0], each[1]) for each in here.readers
        )
        for (number, caller, told), here in known.items()
    }
    numbers, sequences = table.argument[regions].tolist(), np.where(nodes >= 0, table.sequence[nodes], -1).tolist()
    readers = {
        (number, caller, sequence): read[number, caller, told]
        for number, caller, told, sequence in zip(numbers, callers.tolist(), telling, sequences, strict=True)
        if sequence >= 0
    }
    uncounted |= {
        caller if layer is None else layer for (_, caller, _), here in known.items() for layer in here.uncounted
    }
    of_row = marked.of_row(assigned)
    return CompiledTime(
        of_row,
        marked.of_activity,
        marked.begins,
        tuple(marked.kernels),
        tuple(marked.called),
        np.full(len(marked.called), -1),
        tuple(len({share.layer for share in each}) > 1 for each in marked.kernels),
        len(regions),
        unmatched,
        flops,
        frozenset(uncounted),
        marked.without_formula(assigned, of_row) - uncounted,
        passes_untold,
        readers,
    )


def _of_forward(
    table: EventTable, regions: IntColumn, nodes: IntColumn, graphs: Mapping[int, CompiledGraph]
) -> list[int]:
    """Of each of these runs the run of forward that it is the backward of, by their numbers; else its own.

    It lies in the node that the other has made. In there a checkpoint may run graphs of forward again, of several
    layers: these are their own, and make nodes as well.

    Args:
        nodes: the row of the node around each; -1.
    """
    numbers, found = table.argument[regions], table.argument[regions].copy()
    is_backward = [graphs[number].is_backward for number in numbers.tolist()]
    made: dict[tuple[int, int], int] = {}
    for place, backward in enumerate(is_backward):
        row = -1 if backward else int(table.parent[regions[place]])
        while row >= 0 and table.kind[row] != RowKind.NODE:
            if table.kind[row] == RowKind.OP and table.sequence[row] >= 0:
                made[int(table.thread[row]), int(table.sequence[row])] = int(numbers[place])
                break
            row = int(table.parent[row])
    for place, backward in enumerate(is_backward):
        node = nodes[place]
        if backward and node >= 0:
            found[place] = made.get((int(table.forward_thread[node]), int(table.sequence[node])), numbers[place])
    return [int(each) for each in found]


class _Marked:
    """The kernels that ran, and which rows and activities of the device are of which."""

    def __init__(self, table: EventTable) -> None:
        self._table = table
        count = 0 if table.kernels is None else len(table.kernels.name)
        self._rows: list[int] = []
        self._places: list[int] = []
        self.kernels: list[tuple[Share, ...]] = []
        self.called: list[str] = []
        self._counted: list[bool] = []  # of each kernel whether its operations are
        self.of_activity = np.full(count, -1)
        self.begins = np.zeros(count, bool)

    def rows(self, rows: Sequence[int], found: Sequence[int], known: _Known) -> None:
        """These rows of one run are these kernels; -1: none."""
        for row, kernel in zip(rows, found, strict=bool(found)):
            if kernel >= 0 and known.shares[kernel]:
                self._rows.append(row)
                self._places.append(self._kernel(known.shares[kernel], "", counted=known.work[kernel] > 0))

    def zeros(self, rows: Sequence[int], unused: Sequence[Share]) -> None:
        """These rows in front of one run make the gradients of its values that nobody used, in that order."""
        if unused and len(rows) != len(unused):  # in this step it is others: all of the largest
            unused = [max(unused, key=lambda share: share.weight)] * len(rows)
        for row, share in zip(rows, unused, strict=False):
            self._rows.append(row)
            self._places.append(self._kernel((share,), ZEROS_OF_UNUSED))

    def activities(self, activities: Sequence[int], found: Sequence[tuple[int, ...]], known: _Known) -> None:
        """These activities of one run are these kernels, or one of them."""
        places: dict[tuple[int, ...], int] = {}
        begun: set[int] = set()
        for activity, candidates in zip(activities, found, strict=bool(found)):
            shares = known.shares_of_one_of(candidates)
            if not shares:
                continue
            if candidates not in places:
                places[candidates] = self._kernel(shares, _one_of([known.names[each] for each in candidates]))
            self.of_activity[activity] = places[candidates]
            new = next((each for each in candidates if each not in begun), None)
            if new is not None:
                begun.add(new)
                self.begins[activity] = True

    def _kernel(self, shares: tuple[Share, ...], called: str, *, counted: bool = True) -> int:
        self.kernels.append(shares)
        self.called.append(called)
        self._counted.append(counted)
        return len(self.kernels) - 1

    def of_row(self, assigned: Assigned) -> IntColumn:
        """Of each row of the trace the kernel that it is or lies in."""
        marks = np.full(len(self._table), INHERIT, np.int64)
        marks[np.array(self._rows, np.int64)] = self._places
        return assigned.skeleton.levels.propagate(marks, -1).astype(np.int64)

    def without_formula(self, assigned: Assigned, of_row: IntColumn) -> frozenset[int]:
        """Layers of forward's kernels that ran products of matrices which nobody counted: of a library's operation.

        Args:
            of_row: what :meth:`of_row` gives.
        """
        names = assigned.skeleton.table.names
        products = np.flatnonzero([is_product(name) for name in names])
        rows = np.flatnonzero(np.isin(assigned.skeleton.table.name, products) & (of_row >= 0))
        rows = rows[(assigned.steps.of_row[rows] >= 0) & ~assigned.skeleton.in_backward[rows]]
        pairs = zip(of_row[rows].tolist(), assigned.rows.owner[rows].tolist(), strict=True)
        found = {
            caller if share.layer is None else share.layer
            for kernel, caller in set(pairs)
            if not self._counted[kernel]
            for share in self.kernels[kernel]
        }
        return frozenset(found - {OUTSIDE})


def with_phases(assigned: Assigned, graphs: Mapping[int, CompiledGraph]) -> Assigned:
    """``assigned`` with what torch writes no row around, or another one.

    Graphs of optimizers' steps are the optimizer's. A graph of a whole backward pass is a module, which no layer is: to
    call it is no recompute.
    """
    table, rows = assigned.skeleton.table, assigned.rows
    regions = np.flatnonzero(table.kind == RowKind.GRAPH)
    marks = np.full(len(table), INHERIT, np.int64)
    optimizers = [number for number, graph in graphs.items() if graph.is_optimizer]
    marks[regions[np.isin(table.argument[regions], optimizers)]] = 1
    steps = assigned.skeleton.levels.propagate(marks, 0) == 1
    steps &= np.isin(rows.category, (Category.OTHER, Category.FORWARD))
    passes = (rows.category == Category.RECOMPUTE) & (rows.owner < 0)
    passes &= any(graph.is_pass for graph in graphs.values())
    if not (steps | passes).any():
        return assigned
    category, owner = rows.category.copy(), rows.owner.copy()
    category[steps], owner[steps] = Category.OPTIMIZER, OUTSIDE
    category[passes] = Category.LAYER
    return replace(assigned, rows=Rows(category, owner))


def _one_of(kernels: Sequence[str]) -> str:
    """What something is called that is one of these operations: ``aten::mm``, ``aten::mm or 2 others``."""
    names = list(dict.fromkeys(map(row_name, kernels)))
    if len(names) == 1:
        return names[0]
    return f"{names[0]} or {names[1] if len(names) == 2 else f'{len(names) - 1} others'}"


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph as one layer runs it: its kernels, and the operations of a run by layer; None: of that which runs it."""

    names: tuple[str, ...]
    shares: tuple[tuple[Share, ...], ...]
    work: tuple[int, ...]  # floating-point operations of each kernel; 0 where nobody knows
    flops: Mapping[int | None, int]
    uncounted: frozenset[int | None]
    readers: tuple[tuple[int | None, int] | None, ...]  # of each input the layer and line that read it first
    unused: tuple[Share, ...]  # values whose gradients are zeros that backward made: of what made each, by its bytes

    @classmethod
    def of(cls, graph: CompiledGraph, moved: Moved) -> _Known:
        nodes = Nodes.of(graph)
        computed = [computed_by(nodes, kernel, names) for kernel, names in graph.kernels]
        flops = Counter[int | None]()
        for node in graph.nodes.values():
            if node.flops > 0:
                flops[moved.layer(node.layer)] += node.flops
        read = {name: _reader(nodes, name, moved) for name in graph.inputs}
        return cls(
            tuple(name for name, _ in graph.kernels),
            tuple(
                shares_of(nodes, names, moved, computing=kernel.startswith("cpp_"))
                for (kernel, _), names in zip(graph.kernels, computed, strict=True)
            ),
            tuple(
                sum(max(nodes.by_name[name].flops, 0) for name in names if name in nodes.by_name) for names in computed
            ),
            flops,
            frozenset(moved.layer(node.layer) for node in graph.nodes.values() if node.flops < 0 or not graph.sized),
            tuple(read.values()),
            tuple(_of_unused(graph, name, reader) for name, reader in read.items() if name in graph.zeros),
        )

    def shares_of_one_of(self, kernels: Sequence[int]) -> tuple[Share, ...]:
        """The parts of what is one of these kernels: all of theirs, by the work of each where it is known."""
        if len(kernels) == 1:
            return self.shares[kernels[0]]
        work = [self.work[kernel] for kernel in kernels]
        found: list[Share] = []
        for kernel, mine in zip(kernels, work if all(work) else [1] * len(kernels), strict=True):
            shares = self.shares[kernel] or (Share(None, NO_LINE, Category.LAYER, 1),)
            whole = sum(share.weight for share in shares)
            found += [replace(share, weight=mine * SCALE * share.weight // max(whole, 1)) for share in shares]
        return tuple(found)


def _reader(nodes: Nodes, name: str, moved: Moved) -> tuple[int | None, int] | None:
    """The layer and line of the node that reads an input, of several that which comes first in forward."""
    reading = [nodes.by_name[user] for user in nodes.users.get(name, ()) if user in nodes.by_name]
    reading = [node for node in reading if node.layer >= 0 or node.line >= 0]
    if not reading:
        return None
    first = min(reading, key=lambda node: node.sequence if node.sequence >= 0 else _LAST)
    return moved.layer(first.layer), first.line if first.line >= 0 else NO_LINE


def _of_unused(graph: CompiledGraph, name: str, reader: tuple[int | None, int] | None) -> Share:
    """The value of this gradient: it is of what reads the gradient in backward."""
    size = graph.nodes[name].bytes if name in graph.nodes else 0
    return Share(*(reader or (None, NO_LINE)), Category.LAYER, max(size, 1))
