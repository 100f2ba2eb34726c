"""Whose the time of compiled code is: Inductor tells of which nodes each kernel is made, and of which layers these are.

A graph writes a row when it runs, with its kernels below it in the order of the generated code. A kernel that computes
nodes of one layer is that layer's. What several layers were fused into is split between them by the bytes that each of
them would read and write if its part were a kernel of its own: that is an estimate, and counted as one.

Source: B. Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation (ASPLOS 2024), on fusion; S. Williams et al., Roofline (CACM 2009), on time by bytes.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution, Given
from gradscope.attribute.kernel_order import GENERATED, is_of, match, match_replay, row_name
from gradscope.attribute.nodes import OUTSIDE, nearest
from gradscope.attribute.rows import INHERIT, BoolColumn, Category, Rows
from gradscope.attribute.survey import NO_LINE
from gradscope.ops import COLLECTIVE_KERNEL
from gradscope.tables import CompiledGraph, EventTable, FusedNode, IntColumn, RowKind

# What computing a node's result takes on a processor, beside moving it, as that many times its bytes; a device computes
# while it moves. Measured on one (AMD EPYC, one thread, torch 2.13): see docs/compile.md.
_COMPUTING = {
    "inductor_random": 20.0,
    **dict.fromkeys(
        ("exp", "expm1", "log", "log1p", "log2", "erf", "erfc", "tanh", "sigmoid", "sin", "cos", "pow"), 1.5
    ),
    **dict.fromkeys(("rsqrt", "sqrt", "reciprocal", "div"), 0.5),
}
_OPERATIONS = (RowKind.OP, RowKind.ADD, RowKind.COMMUNICATION)
_LAST = sys.maxsize
_T = TypeVar("_T")
_SCALE = 1 << 20  # of shares: whole numbers split a nanosecond's sum exactly


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a kernel.

    Attributes:
        layer: index of the layer; None: the one that called the graph.
        spent: in a graph of backward: on the layer, on recompute, or on the sum of gradients.
        weight: beside those of the other parts.
    """

    layer: int | None
    line: int
    spent: Category
    weight: int


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
        uncounted: layers of graphs that ran with other sizes than those that are known.
        readers: of a run, by its number and the layer that ran it, the layer and line that read each of its inputs:
            of several the first in forward; None where nothing does.
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
    readers: Mapping[tuple[int, int], tuple[tuple[int, int] | None, ...]]

    def inside(self, part: Contribution) -> IntColumn:
        """Of each entry the kernel that it is of; -1."""
        if part.apart is not None:
            return np.full(len(part.row), -1)
        found = self.of_row[part.row]
        if part.kernel is None:
            return found
        replayed = self.of_activity[part.kernel]
        return np.where(replayed >= 0, replayed, found)

    def notes(self) -> list[str]:
        """What the report must say."""
        if not self.unmatched:
            return []
        return [
            f"{self.unmatched} of {self.regions} runs of compiled graphs ran other kernels than they were compiled to: "
            "their time stays with the layer that called them"
        ]


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
    bases = _bases(graphs, table.argument[regions], callers, paths)
    # Several: blocks share the graph. Of one alone they say nothing: a parametrization's layer holds no weight itself.
    holders: dict[int, set[frozenset[int]]] = defaultdict(set)
    for graph in graphs.values():
        holders[id(graph.kernels)].add(graph.holders)
    known: dict[tuple[int, int], _Known] = {}
    flops = Counter[tuple[int, bool]]()
    marked = _Marked(table)
    unmatched = 0
    below = _children(table, regions)
    replayed = _Replayed.of(assigned, regions, below)
    for region, caller in zip(regions.tolist(), callers.tolist(), strict=True):
        number, place = int(table.argument[region]), (int(table.argument[region]), caller)
        if place not in known:
            block = bases.get(number, caller), caller
            if len(holders[id(graphs[number].kernels)]) > 1:
                block = _block(graphs[number], *block, paths)
            known[place] = _Known.of(graphs[number], _Moved.of(*block, paths, graphs[number].holders))
        here = known[place]
        children = below.get(region, [])
        rows = match([table.names[table.name[row]] for row in children], here.names)
        activities = replayed.activities(region, here.names, with_rows=rows is None)
        replay = match_replay(replayed.names(activities), here.names) if activities else None
        if rows is None and replay is None:
            unmatched += 1
            continue
        marked.rows(children, rows or [], here)
        marked.activities(activities, replay or [], here)
        if assigned.steps.of_row[region] >= 0:
            backward = bool(assigned.skeleton.in_backward[region])
            for layer, count in here.flops.items():
                flops[caller if layer is None else layer, backward] += count
    readers = {
        (number, caller): tuple(
            None if each is None else (caller if each[0] is None else each[0], each[1]) for each in here.readers
        )
        for (number, caller), here in known.items()
    }
    uncounted = {caller if layer is None else layer for (_, caller), here in known.items() for layer in here.uncounted}
    return CompiledTime(
        marked.of_row(assigned),
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
        readers,
    )


class _Marked:
    """The kernels that ran, and which rows and activities of the device are of which."""

    def __init__(self, table: EventTable) -> None:
        self._table = table
        count = 0 if table.kernels is None else len(table.kernels.name)
        self._rows: list[int] = []
        self._places: list[int] = []
        self.kernels: list[tuple[Share, ...]] = []
        self.called: list[str] = []
        self.of_activity = np.full(count, -1)
        self.begins = np.zeros(count, bool)

    def rows(self, rows: Sequence[int], found: Sequence[int], known: _Known) -> None:
        """These rows of one run are these kernels; -1: none."""
        for row, kernel in zip(rows, found, strict=bool(found)):
            if kernel >= 0 and known.shares[kernel]:
                self._rows.append(row)
                self._places.append(self._kernel(known.shares[kernel], ""))

    def activities(self, activities: Sequence[int], found: Sequence[tuple[int, ...]], known: _Known) -> None:
        """These activities of one run are these kernels, or one of them."""
        places: dict[tuple[int, ...], int] = {}
        for activity, candidates in zip(activities, found, strict=bool(found)):
            shares = known.shares_of_one_of(candidates)
            if not shares:
                continue
            if candidates not in places:
                places[candidates] = self._kernel(shares, row_name(known.names[candidates[0]]))
                self.begins[activity] = True
            self.of_activity[activity] = places[candidates]

    def _kernel(self, shares: tuple[Share, ...], called: str) -> int:
        self.kernels.append(shares)
        self.called.append(called)
        return len(self.kernels) - 1

    def of_row(self, assigned: Assigned) -> IntColumn:
        """Of each row of the trace the kernel that it is or lies in."""
        marks = np.full(len(self._table), INHERIT, np.int64)
        marks[self._table.depth == 0] = -1
        marks[np.array(self._rows, np.int64)] = self._places
        return assigned.skeleton.levels.propagate(marks, -1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What a device did for the graphs that ran.

    Attributes:
        below: of each run its rows.
        by_row: of the row of a run, or a row directly below one, the activities launched there, in order of start.
    """

    table: EventTable
    below: Mapping[int, Sequence[int]]
    by_row: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, assigned: Assigned, regions: IntColumn, below: Mapping[int, Sequence[int]]) -> _Replayed:
        table = assigned.skeleton.table
        found: dict[int, list[int]] = defaultdict(list)
        if table.kernels is not None:
            marks = np.full(len(table), INHERIT, np.int64)
            marks[table.depth == 0] = -1
            tops = np.array([*regions.tolist(), *(row for rows in below.values() for row in rows)], np.int64)
            marks[tops] = tops
            top = assigned.skeleton.levels.propagate(marks, -1).astype(np.int64)
            communicates = np.array([bool(COLLECTIVE_KERNEL.search(name)) for name in table.kernels.names], bool)
            wanted = (table.kernels.row >= 0) & ~communicates[table.kernels.name]
            for activity in np.flatnonzero(wanted).tolist():
                row = int(top[table.kernels.row[activity]])
                if row >= 0:
                    found[row].append(activity)
        return cls(table, below, found)

    def activities(self, region: int, kernels: Sequence[str], *, with_rows: bool) -> list[int]:
        """What a run launched under no operation: a CUDA graph's replay.

        Args:
            with_rows: what its operations launched, too: a graph that is replayed in parts runs others between them.
        """
        found = list(self.by_row.get(region, ()))
        if found and with_rows:
            for row in self.below.get(region, ()):
                name = self.table.names[self.table.name[row]]
                if any(is_of(name, kernel) for kernel in kernels):
                    found += self.by_row.get(row, ())
        return sorted(found)

    def names(self, activities: Sequence[int]) -> list[str]:
        """What the device calls these."""
        kernels = self.table.kernels
        return [] if kernels is None else [kernels.names[kernels.name[each]] for each in activities]


def with_names(compiled: CompiledTime, names: tuple[str, ...]) -> tuple[CompiledTime, tuple[str, ...]]:
    """``compiled`` with the places of what no row names among ``names``, and these with what they lack."""
    known = list(names)
    place: dict[str, int] = {}
    for number, name in enumerate(known):
        place.setdefault(name, number)
    for name in compiled.called:
        if name and name not in place:
            place[name] = len(known)
            known.append(name)
    op = np.array([place[name] if name else -1 for name in compiled.called], np.int64)
    return replace(compiled, op=op), tuple(known)


def with_optimizers(assigned: Assigned, graphs: Mapping[int, CompiledGraph]) -> Assigned:
    """``assigned`` with what graphs of optimizers' steps take as the optimizer's: torch writes no row around these."""
    table = assigned.skeleton.table
    regions = np.flatnonzero(table.kind == RowKind.GRAPH)
    steps = [number for number, graph in graphs.items() if graph.is_optimizer]
    marks = np.full(len(table), INHERIT, np.int64)
    marks[table.depth == 0] = 0
    marks[regions[np.isin(table.argument[regions], steps)]] = 1
    inside = assigned.skeleton.levels.propagate(marks, 0) == 1
    inside &= np.isin(assigned.rows.category, (Category.OTHER, Category.FORWARD))
    if not inside.any():
        return assigned
    category, owner = assigned.rows.category.copy(), assigned.rows.owner.copy()
    category[inside], owner[inside] = Category.OPTIMIZER, OUTSIDE
    return replace(assigned, rows=Rows(category, owner))


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph as one layer runs it: its kernels, and the operations of a run by layer; None: of that which runs it."""

    names: tuple[str, ...]
    shares: tuple[tuple[Share, ...], ...]
    work: tuple[int, ...]  # floating-point operations of each kernel; 0 where nobody knows
    flops: Mapping[int | None, int]
    uncounted: frozenset[int | None]
    readers: tuple[tuple[int | None, int] | None, ...]  # of each input the layer and line that read it first

    @classmethod
    def of(cls, graph: CompiledGraph, moved: _Moved) -> _Known:
        nodes = _Nodes.of(graph)
        flops = Counter[int | None]()
        for node in graph.nodes.values():
            if node.flops:
                flops[moved.layer(node.layer)] += node.flops
        return cls(
            tuple(name for name, _ in graph.kernels),
            tuple(
                shares_of(nodes, _computed(nodes, kernel, names), moved, computing=kernel.startswith("cpp_"))
                for kernel, names in graph.kernels
            ),
            tuple(
                sum(nodes.by_name[name].flops for name in _computed(nodes, kernel, names) if name in nodes.by_name)
                for kernel, names in graph.kernels
            ),
            flops,
            frozenset(moved.layer(node.layer) for node in graph.nodes.values() if not graph.sized),
            tuple(_reader(nodes, name, moved) for name in graph.inputs),
        )

    def shares_of_one_of(self, kernels: Sequence[int]) -> tuple[Share, ...]:
        """The parts of what is one of these kernels: all of theirs, by the work of each where it is known."""
        if len(kernels) == 1:
            return self.shares[kernels[0]]
        work = [self.work[kernel] for kernel in kernels]
        found: list[Share] = []
        for kernel, mine in zip(kernels, work if all(work) else [1] * len(kernels), strict=True):
            whole = sum(share.weight for share in self.shares[kernel])
            found += [
                replace(share, weight=mine * _SCALE * share.weight // max(whole, 1)) for share in self.shares[kernel]
            ]
        return tuple(found)


def _reader(nodes: _Nodes, name: str, moved: _Moved) -> tuple[int | None, int] | None:
    """The layer and line of the node that reads an input, of several that which comes first in forward."""
    reading = [nodes.by_name[user] for user in nodes.users.get(name, ()) if user in nodes.by_name]
    reading = [node for node in reading if node.layer >= 0 or node.line >= 0]
    if not reading:
        return None
    first = min(reading, key=lambda node: node.sequence if node.sequence >= 0 else _LAST)
    return moved.layer(first.layer), first.line if first.line >= 0 else NO_LINE


def give_to_origins(assigned: Assigned, parts: Sequence[Contribution], compiled: CompiledTime) -> list[Contribution]:
    """``parts`` with what compiled kernels take at the layers and lines that they were made of."""
    found: list[Contribution] = []
    for part in parts:
        inside = compiled.inside(part)
        found.append(part.only(np.flatnonzero(inside < 0)))
        places = np.flatnonzero(inside >= 0)
        if len(places):
            found.append(_given(assigned, part.only(places), inside[places], compiled))
    return found


def _given(assigned: Assigned, part: Contribution, kernels: IntColumn, compiled: CompiledTime) -> Contribution:
    """Each entry in as many pieces as its kernel has shares."""
    entry, ns, layer, line, kind = (list[int]() for _ in range(5))
    owner, category = assigned.rows.owner[part.row], assigned.rows.category[part.row]
    for place, kernel in enumerate(kernels.tolist()):
        shares = compiled.kernels[kernel]
        for share, piece in _split(int(part.ns[place]), [(one, one.weight) for one in shares]):
            entry.append(place)
            ns.append(piece)
            layer.append(int(owner[place]) if share.layer is None else share.layer)
            line.append(share.line)
            kind.append(share.spent)
    pieces = part.only(np.array(entry, np.int64))
    layers = np.array(layer, np.int64)
    spent = category[entry]
    # Outside of every module nodes have no owner, and forward is between the phases: here both are known.
    spent[(spent == Category.UNATTRIBUTED) & (layers >= 0)] = Category.LAYER
    spent[(spent == Category.OTHER) & (layers >= 0)] = Category.FORWARD
    spent = np.where(spent == Category.LAYER, np.array(kind, np.int8), spent)
    first = np.diff(np.array(entry), prepend=-1) != 0  # it is one call, not one for each layer
    estimated = np.array(compiled.estimated, bool)[kernels[entry]]
    op = compiled.op[kernels[entry]]
    calls = pieces.calls
    if pieces.kernel is not None:  # what has no row of its own was called where it began
        calls = np.maximum(calls, compiled.begins[pieces.kernel])
    return replace(
        pieces,
        op=np.where(op >= 0, op, pieces.op),
        ns=np.array(ns, np.int64),
        calls=np.where(first, calls, 0),
        given=Given(spent, layers, np.array(line, np.int64), estimated),
    )


def estimated_ns(assigned: Assigned, parts: Sequence[Contribution], layers: int) -> tuple[IntColumn, IntColumn]:
    """Of each layer the ns of a mean step's backward, and of its forward, that are an estimate."""
    found = np.zeros((2, layers), np.int64)
    for part in parts:
        if part.given is None:
            continue
        owner, category = part.owner(assigned), part.category(assigned)
        mine = part.given.estimated & (owner >= 0) & (assigned.steps.of_row[part.row] >= 0)
        for which, forward in enumerate((False, True)):
            wanted = mine & ((category == Category.FORWARD) == forward)
            np.add.at(found[which], owner[wanted], part.ns[wanted])
    steps = max(len(assigned.steps), 1)
    return found[0] // steps, found[1] // steps


# --------------------------------------------------------------------------------------------------------------------
# One kernel
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a graph, views looked through.

    Attributes:
        read: of each node what it reads.
        users: of each node what reads it.
    """

    by_name: Mapping[str, FusedNode]
    read: Mapping[str, frozenset[str]]
    users: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, graph: CompiledGraph) -> _Nodes:
        source: dict[str, str] = {}
        read: dict[str, frozenset[str]] = {}
        users: dict[str, set[str]] = defaultdict(set)
        for name, node in graph.nodes.items():  # each behind its inputs
            inputs = [source.get(each, each) for each in node.inputs]
            source[name] = inputs[0] if node.is_view and inputs else name
            read[name] = frozenset(inputs)
            if not node.is_view:
                for each in inputs:
                    users[each].add(name)
        return cls(graph.nodes, read, {name: frozenset(found) for name, found in users.items()})

    def moved_bytes(self, names: Sequence[str]) -> int:
        """Bytes that these would read and write as a kernel of their own: what is made by others, or read by them."""
        mine = set(names)
        read = {each for name in names for each in self.read[name]} - mine
        written = [name for name in names if not self.users.get(name, frozenset()) or self.users[name] - mine]
        return sum(self.by_name[name].bytes for name in (*read, *written) if name in self.by_name)

    def weight(self, names: Sequence[str], *, computing: bool) -> int:
        """What these take, in bytes moved."""
        weight = float(self.moved_bytes(names))
        if computing:
            weight += sum(_COMPUTING.get(self.by_name[name].op, 0.0) * self.by_name[name].bytes for name in names)
        return round(weight)


def shares_of(nodes: _Nodes, names: Sequence[str], moved: _Moved, *, computing: bool = True) -> tuple[Share, ...]:
    """The parts of a kernel that computes these nodes: by layer, in backward or recompute, and by line.

    Nodes that Inductor has made itself are of whatever layer the others are.

    Args:
        computing: it runs on a processor, where computing takes time beside moving.
    """
    known = {name: node for name in names if (node := nodes.by_name.get(name)) and (node.layer >= 0 or node.line >= 0)}
    made = {name: node for name, node in known.items() if not node.is_view}
    parts: dict[tuple[int | None, Category], list[str]] = defaultdict(list)
    for name, node in (made or known).items():  # of views alone: what is copied for them
        parts[moved.layer(node.layer), _spent(node)].append(name)
    moves = {part: nodes.weight(names, computing=computing) for part, names in parts.items()}
    if not any(moves.values()):
        moves = dict.fromkeys(moves, 1)
    shares: list[Share] = []
    for part, names in parts.items():
        lines = Counter[int]()
        for name in names:
            lines[known[name].line] += max(known[name].bytes, 1)
        weights = _split(moves[part] * _SCALE, [(line, size) for line, size in lines.items()])
        shares += [Share(part[0], line if line >= 0 else NO_LINE, part[1], weight) for line, weight in weights]
    return tuple(shares)


def _spent(node: FusedNode) -> Category:
    if node.forward:
        return Category.RECOMPUTE
    return Category.GRADIENT_SUM if node.is_sum else Category.LAYER


def _computed(nodes: _Nodes, kernel: str, names: Sequence[str]) -> Sequence[str]:
    """The nodes that a kernel computes: of an operation of torch's own that one, whatever else Inductor names."""
    if kernel.startswith(GENERATED):
        return names
    mine = [name for name in names if name in nodes.by_name and is_of(f"::{nodes.by_name[name].op}", kernel)]
    return mine or names


@dataclass(frozen=True, slots=True)
class _Moved:
    """Layers of one block's graph, as those of the block that runs it: equal blocks share one.

    Attributes:
        to: of each layer below the block that was compiled the one at its place; None: all stay.
    """

    to: Mapping[int, int] | None

    @classmethod
    def of(cls, base: int, caller: int, paths: Sequence[str], holders: Collection[int] = ()) -> _Moved:
        if base == caller or base < 0 or caller < 0:
            return cls(None)
        index = {path: number for number, path in enumerate(paths)}
        below = {number: path[len(paths[base]) :] for number, path in enumerate(paths) if _is_below(path, paths[base])}
        # What blocks share lies in the first of them alone: its parameters are those of every run.
        there = {number: number if number in holders else caller for number in below}
        return cls({number: index.get(paths[caller] + rest, there[number]) for number, rest in below.items()})

    def layer(self, number: int) -> int | None:
        """The layer; None: that which runs the graph."""
        if number < 0:
            return None
        return number if self.to is None else self.to.get(number, number)


def _is_below(path: str, base: str) -> bool:
    return not base or path == base or path.startswith(base + ".")


def _bases(
    graphs: Mapping[int, CompiledGraph], numbers: IntColumn, callers: IntColumn, paths: Sequence[str]
) -> dict[int, int]:
    """Of each graph that several layers run the one that it was compiled in: that which its nodes lie in."""
    found: dict[int, int] = {}
    nodes = {number: id(graphs[number].nodes) for number in np.unique(numbers).tolist()}
    for number, graph in nodes.items():
        ran = np.isin(numbers, [other for other, same in nodes.items() if same == graph])
        candidates = [caller for caller in np.unique(callers[ran]).tolist() if caller >= 0]
        inside = {paths[node.layer] for node in graphs[number].nodes.values() if node.layer >= 0}
        # A layer that several blocks share lies in the first of them, and none of its nodes in that which ran it.
        held = {each: sum(_is_below(path, paths[each]) for path in inside) for each in candidates}
        if any(held.values()):
            found[number] = max(candidates, key=lambda each: (held[each], len(paths[each])))
    return found


def _block(graph: CompiledGraph, base: int, caller: int, paths: Sequence[str]) -> tuple[int, int]:
    """The block that a graph was compiled in and the one that ran it: ``base`` and ``caller``, or parts of a caller.

    A part of a model that runs for several blocks, behind a graph break say, tells by its parameters of which it is.
    """
    if base != caller or not graph.holders:
        return base, caller
    inside = {node.layer for node in graph.nodes.values() if node.layer >= 0}
    ran = {paths[layer] for layer in graph.holders}
    if ran <= {paths[layer] for layer in inside}:
        return base, caller
    to = _common(sorted(ran))
    for layer in sorted(inside, key=lambda layer: len(paths[layer])):
        at = paths[layer]
        while at:
            if all(at + path[len(to) :] in paths for path in ran) and _is_equal_block(at, to, inside, ran, paths):
                return paths.index(at), paths.index(to)
            at = at.rpartition(".")[0]
    return base, caller


def _is_equal_block(at: str, to: str, inside: set[int], ran: set[str], paths: Sequence[str]) -> bool:
    """Check that what was compiled in one block has the layers of the other that it was run with."""
    compiled = {paths[layer] for layer in inside}
    return bool(to) and at != to and all(at + path[len(to) :] in compiled for path in ran)


def _common(paths: Sequence[str]) -> str:
    """The innermost module around all of these: their own path where there is one."""
    parts = [path.split(".") for path in paths]
    shared = 0
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared += 1
    return ".".join(parts[0][:shared])


def _split(whole: int, shares: Sequence[tuple[_T, int]]) -> list[tuple[_T, int]]:
    """``whole`` by these weights; the parts add up to it."""
    total = sum(weight for _, weight in shares)
    parts, until, given = [], 0, 0
    for what, weight in shares:
        until += weight
        upto = whole * until // total
        parts.append((what, upto - given))
        given = upto
    return parts


# --------------------------------------------------------------------------------------------------------------------
# The kernels of a run
# --------------------------------------------------------------------------------------------------------------------


def _children(table: EventTable, regions: IntColumn) -> dict[int, list[int]]:
    """The rows directly below each of these, and below annotations in these, in the order of time."""
    found: dict[int, list[int]] = defaultdict(list)
    rows = np.flatnonzero((table.parent >= 0) & (table.kind != RowKind.ANNOTATION))
    above = table.parent[rows].astype(np.int64)
    around = nearest(table, above, (RowKind.GRAPH, *_OPERATIONS))
    inside = np.isin(around, regions)
    for row, region in zip(rows[inside].tolist(), around[inside].tolist(), strict=True):
        found[region].append(row)
    return found
