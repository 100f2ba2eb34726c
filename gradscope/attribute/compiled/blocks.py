"""Blocks that share a compiled graph: of which block a run is, and where its layers lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.nodes import OUTSIDE
from gradscope.tables import CompiledGraph, IntColumn


@dataclass(frozen=True, slots=True)
class Moved:
    """Layers of a graph, as those of the block or the model that runs it: equal ones share a graph.

    Attributes:
        to: of each layer that another stands in for that one; None: all stay.
    """

    to: Mapping[int, int] | None

    @classmethod
    def of(
        cls, pairs: Collection[tuple[int, int]], paths: Sequence[str], base: int = OUTSIDE, caller: int = OUTSIDE
    ) -> Moved:
        """Each layer as that whose parameters it was run with.

        Layers without parameters lie where those beside them do; where these tell nothing, at the same place below what
        runs the graph, or there itself.

        Args:
            pairs: layers that it was compiled with, each with that which stands at its place in the run.
            base: the layer that it was compiled in, of :func:`bases_of`.
            caller: the layer that runs it.
        """
        to: dict[int, int] = {}
        for one, other in pairs:
            if to.get(one, one) == one:  # what models share, a tied weight, lies in the first of them alone
                to[one] = other
        index = {path: number for number, path in enumerate(paths)}
        blocks = sorted({_around(paths[one], paths[other]) for one, other in to.items() if one != other}, reverse=True)
        is_elsewhere = base != caller and base >= 0 and caller >= 0
        for number, path in enumerate(paths):
            if number not in to:
                images = (_below(there, path, at) for _, at, there in blocks if _is_below(path, at))
                to[number] = next((index[image] for image in images if image in index), number)
                if to[number] == number and is_elsewhere and _is_below(path, paths[base]):
                    to[number] = index.get(_below(paths[caller], path, paths[base]), caller)
        return cls(to if blocks or is_elsewhere else None)

    def layer(self, number: int) -> int | None:
        """The layer; None: that which runs the graph."""
        if number < 0:
            return None
        return number if self.to is None else self.to.get(number, number)


def _around(one: str, other: str) -> tuple[int, str, str]:
    """The outermost blocks around two layers that have one place in them, behind the length of the first's path."""
    first, second = one.split("."), other.split(".")
    while first and second and first[-1] == second[-1]:
        del first[-1], second[-1]
    return len(first), ".".join(first), ".".join(second)


def _below(block: str, path: str, base: str) -> str:
    """What lies where ``path`` does below ``base``, below ``block``."""
    return ".".join(part for part in (block, path[len(base) :].removeprefix(".")) if part)


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
