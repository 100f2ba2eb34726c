"""Blocks that share a compiled graph: of which block a run is, and where its layers lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
            if to.get(one, one) == one:  # what models share, a tied weight, lies in the first of them alone
                to[one] = other
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
