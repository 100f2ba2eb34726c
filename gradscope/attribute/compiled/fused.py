"""A kernel of a compiled graph: the nodes that it computes, and what of it is of which layer and line.

What several layers were fused into is split between them by the bytes that each would read and write if its part were a
kernel of its own, and on a processor by what it computes.

Source: J. Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation (ASPLOS 2024), on fusion; S. Williams et al., Roofline (CACM 2009), on time by bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradscope.attribute.compiled.blocks import Moved
from gradscope.attribute.compiled.order import is_of
from gradscope.attribute.rows import Category
from gradscope.attribute.survey import NO_LINE
from gradscope.ops import GENERATED
from gradscope.tables import CompiledGraph, FusedNode

# What computing a node's result takes on a processor, beside moving it, as that many times its bytes; a device computes
# while it moves. Measured on one (AMD EPYC, one thread, torch 2.13): see docs/compile.md.
_COMPUTING = {
    "inductor_random": 20.0,
    **dict.fromkeys(
        ("exp", "expm1", "log", "log1p", "log2", "erf", "erfc", "tanh", "sigmoid", "sin", "cos", "pow"), 1.5
    ),
    **dict.fromkeys(("rsqrt", "sqrt", "reciprocal", "div"), 0.5),
}

_T = TypeVar("_T")
SCALE = 1 << 20  # of shares: whole numbers split a nanosecond's sum exactly


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
class Nodes:
    """The nodes of a graph, views looked through.

    Attributes:
        read: of each node what it reads.
        users: of each node what reads it.
    """

    by_name: Mapping[str, FusedNode]
    read: Mapping[str, frozenset[str]]
    users: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, graph: CompiledGraph) -> Nodes:
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


def shares_of(nodes: Nodes, names: Sequence[str], moved: Moved, *, computing: bool = True) -> tuple[Share, ...]:
    """The parts of a kernel that computes these nodes: by layer, in backward or recompute, and by line.

    Nodes that Inductor has made itself are of whatever layer the others are.

    Args:
        computing: it runs on a processor, where computing takes time beside moving.
    """
    there = [(name, node) for name in names if (node := nodes.by_name.get(name)) is not None]
    known = {name: node for name, node in there if node.layer >= 0 or node.line >= 0 or node.is_sum}
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
        weights = split(moves[part] * SCALE, [(line, size) for line, size in lines.items()])
        shares += [Share(part[0], line if line >= 0 else NO_LINE, part[1], weight) for line, weight in weights]
    return tuple(shares)


def _spent(node: FusedNode) -> Category:
    if node.forward:
        return Category.RECOMPUTE
    return Category.GRADIENT_SUM if node.is_sum else Category.LAYER


def computed_by(nodes: Nodes, kernel: str, names: Sequence[str]) -> Sequence[str]:
    """The nodes that a kernel computes: of an operation of torch's own that one, whatever else Inductor names."""
    if kernel.startswith(GENERATED):
        return names
    mine = [name for name in names if name in nodes.by_name and is_of(f"::{nodes.by_name[name].op}", kernel)]
    return mine or names


def split(whole: int, shares: Sequence[tuple[_T, int]]) -> list[tuple[_T, int]]:
    """``whole`` by these weights; the parts add up to it."""
    total = sum(weight for _, weight in shares)
    parts, until, given = [], 0, 0
    for what, weight in shares:
        until += weight
        upto = whole * until // total
        parts.append((what, upto - given))
        given = upto
    return parts
