"""The two matmuls of attention: which tensor is what, and in which order its dimensions must stand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradscope.ops import COPIES, RESHAPES_OR_FLATTEN, names
from gradscope.patching.match.graph import cast_source, swaps_last_two
from gradscope.patching.match.match import Of
from gradscope.recording.graph import Node, Value

_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})

# What may stand between a matmul and the softmax, beside casts.
_BETWEEN = COPIES | RESHAPES_OR_FLATTEN | names("mul div add sub masked_fill where setitem tanh")

_DOTS = "αβγδεζηθ"  # labels for what an ellipsis stands for


@dataclass(frozen=True)
class Operand:
    """A tensor, and the order that brings it to [..., length, size]."""

    value: Value
    order: tuple[int, ...] | None = None
    broadcast: bool = False  # it has no dimension for the heads, all of which read it

    @property
    def suffix(self) -> str:
        """The call that brings it there."""
        order = "" if self.order is None else permuted(self.order)
        return f"{order}.unsqueeze(-3)" if self.broadcast else order

    def piece(self, role: str) -> Of:
        """Return the operand's text."""
        return Of(self.value, role, self.suffix)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape after that call."""
        order = self.order or range(len(self.value.shape))
        shape = tuple(self.value.shape[each] for each in order)
        return (*shape[:-2], 1, *shape[-2:]) if self.broadcast else shape


def permuted(order: tuple[int, ...]) -> str:
    """The shortest call that puts dimensions in ``order``."""
    moved = [index for index, each in enumerate(order) if index != each]
    if not moved:
        return ""
    if len(moved) == 2:
        last = len(order) - 2
        pair = (-2, -1) if moved[0] == last else (moved[0], moved[1])
        return f".transpose({pair[0]}, {pair[1]})"
    return f".permute({', '.join(map(str, order))})"


def is_product(node: Node) -> bool:
    """Return whether it multiplies matrices."""
    return node.op in _PRODUCTS and bool(node.outputs) and "out" not in node.kwargs


def sides(node: Node) -> tuple[Operand, Operand, str] | None:
    """Return weights, values and what must be called on the result, of a matmul with values."""
    if node.op in {"matmul", "bmm"}:
        if len(node.inputs) != 2 or node.kwargs:
            return None
        return Operand(node.inputs[0]), Operand(node.inputs[1]), ""
    parsed = _equation(node) if node.op == "einsum" else None
    if parsed is None:
        return None
    (one, other), out = parsed
    for weights, value, first in ((one, other, 0), (other, one, 1)):
        if len(weights) < 3:
            continue
        *batch, own, shared = list(weights)
        size = [label for label in value if label not in weights]
        lacks = [label for label in batch if label not in value]
        fits = shared in value and shared not in out and own in out and own not in value and len(size) == 1
        if not fits or size[0] not in out or set(out) != {*batch, own, size[0]} or lacks not in ([], batch[-1:]):
            continue
        order = tuple(value.index(label) for label in [*batch, shared, size[0]] if label not in lacks)
        if len(order) != len(value):
            continue
        result = [*batch, own, size[0]]
        suffix = permuted(tuple(result.index(label) for label in out))
        return Operand(node.inputs[first]), Operand(node.inputs[1 - first], order, bool(lacks)), suffix
    return None


def factors(scores: Value, last: Node) -> tuple[Operand, Operand, set[Node]] | None:
    """Return queries, keys and the transposition that goes, of a matmul whose result are scores.

    ``last`` is the call in whose function the transposition must stand to go with it.
    """
    node = scores.producer
    assert node is not None
    if node.op in {"matmul", "bmm", "baddbmm"}:
        if node.op == "baddbmm":
            query, turned = node.argument(1, "batch1"), node.argument(2, "batch2")
        elif len(node.inputs) == 2 and not node.kwargs:
            query, turned = node.inputs
        else:
            return None
        if not isinstance(query, Value) or not isinstance(turned, Value) or len(turned.shape) < 2:
            return None
        return Operand(query), *_turned(turned, node, last)
    parsed = _equation(node)
    if parsed is None:
        return None
    labels, out = parsed
    if len(out) < 3:
        return None
    rows, columns, batch = out[-2], out[-1], out[:-2]
    found: dict[str, Operand] = {}
    for given, value in zip(labels, node.inputs, strict=True):
        for own, role in ((rows, "query"), (columns, "key")):
            size = [label for label in given if label not in out]
            lacks = [label for label in batch if label not in given]
            if own not in given or len(size) != 1 or (lacks and (role == "query" or lacks != [batch[-1]])):
                continue
            if set(given) == {*batch, own, size[0]} - set(lacks):
                order = tuple(given.index(label) for label in [*batch, own, size[0]] if label not in lacks)
                found[role] = Operand(value, order, bool(lacks))
    return (found["query"], found["key"], set()) if len(found) == 2 else None


def _turned(keys: Value, node: Node, last: Node) -> tuple[Operand, set[Node]]:
    """The keys before a transposition that is made for ``node`` alone; else turned back."""
    key, made = swaps_last_two(keys), keys.producer
    if key is not None and made is not None and keys.users == [node] and not keys.alive:
        here = made.places and made.places[0].frame is last.places[0].frame
        if here:
            return Operand(key), {made}
    rank = len(keys.shape)
    return Operand(keys, (*range(rank - 2), rank - 1, rank - 2)), set()


def leads_to_product(value: Value) -> bool:
    """Return whether a matmul of two tensors stands behind, over what may stand between it and the softmax."""
    seen, left = {value}, [value]
    while left:
        value = left.pop()
        node = value.producer
        if node is None or (node.op not in _BETWEEN and not is_product(node) and cast_source(value) is None):
            continue
        if is_product(node):
            return True
        for each in node.inputs:
            if each not in seen and math.prod(each.shape) == math.prod(value.shape):
                seen.add(each)
                left.append(each)
    return False


def _equation(node: Node) -> tuple[tuple[str, str], str] | None:
    """The labels of a matmul of two tensors by einsum."""
    text = node.args[0] if node.args else None
    if not isinstance(text, str) or "->" not in text or len(node.inputs) != 2:
        return None
    given, _, out = text.replace(" ", "").partition("->")
    one, _, other = given.partition(",")
    if "..." in text:
        pairs = zip((one, other), node.inputs, strict=True)
        counts = {len(value.shape) - len(labels.replace("...", "")) for labels, value in pairs}
        if len(counts) != 1 or not all("..." in labels for labels in (one, other, out)):
            return None
        dots = _DOTS[: counts.pop()]
        one, other, out = (labels.replace("...", dots) for labels in (one, other, out))
    if not other or any(len(set(labels)) != len(labels) for labels in (one, other, out)):
        return None
    return (one, other), out
