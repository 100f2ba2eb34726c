"""Blocks that share a compiled graph: of which block a run is, and where its layers lie."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscope.tables import CompiledGraph, IntColumn


@dataclass(frozen=True, slots=True)
class Moved:
    """Layers of one block's graph, as those of the block that runs it: equal blocks share one.

    Attributes:
        to: of each layer below the block that was compiled the one at its place; None: all stay.
    """

    to: Mapping[int, int] | None

    @classmethod
    def of(cls, base: int, caller: int, paths: Sequence[str], holders: Collection[int] = ()) -> Moved:
        if base == caller or base < 0 or caller < 0:
            return cls(None)
        index = {path: number for number, path in enumerate(paths)}
        below = {number: path[len(paths[base]) :] for number, path in enumerate(paths) if _is_below(path, paths[base])}
        # What blocks share lies in the first of them alone: its parameters are those of every run.
        there = {number: number if number in holders else caller for number in below}
        return cls({number: index.get(paths[caller] + rest, there[number]) for number, rest in below.items()})

    @classmethod
    def by_layers(cls, pairs: Collection[tuple[int, int]], paths: Sequence[str]) -> Moved:
        """Of a function that is called for several models: each layer as that whose parameters it was run with.

        Layers without parameters lie where those beside them do.

        Args:
            pairs: layers that it was compiled with, each with that which stands at its place in the run.
        """
        to: dict[int, int] = {}
        for one, other in pairs:
            to.setdefault(one, other)
        index = {path: number for number, path in enumerate(paths)}
        blocks = sorted({_around(paths[one], paths[other]) for one, other in to.items() if one != other}, reverse=True)
        for number, path in enumerate(paths):
            if number not in to:
                images = (there + path[len(at) :] for _, at, there in blocks if _is_below(path, at))
                to[number] = next((index[image] for image in images if image in index), number)
        return cls(to if blocks else None)

    def layer(self, number: int) -> int | None:
        """The layer; None: that which runs the graph."""
        if number < 0:
            return None
        return number if self.to is None else self.to.get(number, number)


def _around(one: str, other: str) -> tuple[int, str, str]:
    """The outermost blocks around two layers that have one place in them, behind the length of the first's path."""
    first, second = one.split("."), other.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        del first[-1], second[-1]
    return len(first), ".".join(first), ".".join(second)


def _is_below(path: str, base: str) -> bool:
    return not base or path == base or path.startswith(base + ".")


def bases_of(
    graphs: Mapping[int, CompiledGraph], numbers: IntColumn, callers: IntColumn, paths: Sequence[str]
) -> dict[int, int]:
    """Of each graph that several layers run the one that it was compiled in: that which its nodes lie in."""
    found: dict[int, int] = {}
    which = {number: _which(graphs[number]) for number in np.unique(numbers).tolist()}
    for number, graph in which.items():
        ran = np.isin(numbers, [other for other, same in which.items() if same == graph])
        candidates = [caller for caller in np.unique(callers[ran]).tolist() if caller >= 0]
        inside = {paths[node.layer] for node in graphs[number].nodes.values() if node.layer >= 0}
        # A layer that several blocks share lies in the first of them, and none of its nodes in that which ran it.
        held = {each: sum(_is_below(path, paths[each]) for path in inside) for each in candidates}
        if any(held.values()):
            found[number] = max(candidates, key=lambda each: (held[each], len(paths[each])))
    return found


def _which(graph: CompiledGraph) -> tuple[str, int]:
    return ("nodes", id(graph.nodes)) if graph.compiled is None else ("compiled", graph.compiled)


def block_of(
    graph: CompiledGraph, holders: Collection[int], base: int, caller: int, paths: Sequence[str]
) -> tuple[int, int]:
    """The block that a graph was compiled in and the one that ran it: ``base`` and ``caller``, or parts of a caller.

    A part of a model that runs for several blocks, behind a graph break say, tells by its parameters of which it is.

    Args:
        holders: the layers whose parameters it was run with, or of backward the graph of forward.
    """
    if base != caller or not holders:
        return base, caller
    inside = {paths[node.layer] for node in graph.nodes.values() if node.layer >= 0}
    ran = {paths[layer] for layer in holders}
    if ran <= inside:
        return base, caller
    known = {path: number for number, path in enumerate(paths)}
    found = max(_equal_blocks(inside, ran, known), default=None)
    return (base, caller) if found is None else (known[found.at], known[found.to])


class _Pair(NamedTuple):
    layers: int  # of the graph that lie in the block, and have one at their place in the other
    at: str
    to: str


def _equal_blocks(inside: set[str], ran: set[str], known: Container[str]) -> Iterator[_Pair]:
    """Blocks that a graph may have been compiled in, each with one that has the layers that it was run with.

    Of a graph that is run with one parameter alone there are many: the one that has most of its layers is meant.
    """
    blocks = {above for path in inside for above in _upwards(path)}
    for to in _upwards(_common(sorted(ran))):
        for at in blocks - {to}:
            if all(at + path[len(to) :] in inside for path in ran):
                below = (path for path in inside if _is_below(path, at))
                yield _Pair(sum(to + path[len(at) :] in known for path in below), at, to)


def _upwards(path: str) -> Iterator[str]:
    """A module's path and those around it, but for the model's."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _common(paths: Sequence[str]) -> str:
    """The innermost module around all of these: their own path where there is one."""
    parts = [path.split(".") for path in paths]
    shared = 0
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared += 1
    return ".".join(parts[0][:shared])
