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

    def layer(self, number: int) -> int | None:
        """The layer; None: that which runs the graph."""
        if number < 0:
            return None
        return number if self.to is None else self.to.get(number, number)


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


def block_of(graph: CompiledGraph, base: int, caller: int, paths: Sequence[str]) -> tuple[int, int]:
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
