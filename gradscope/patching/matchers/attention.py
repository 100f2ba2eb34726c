"""Attention by hand: queries times keys, scaled, masked, a softmax over the keys, dropout, times values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gradscope.patching.graph import (
    COPIES,
    argument,
    cast_source,
    dimension,
    made_from,
    makers,
    number,
    remade,
    swaps_last_two,
)
from gradscope.patching.match import Argument, Match, Of, Piece, Scalar, Setting
from gradscope.patching.record import Node, Recording, Value

RECIPE = "attention"

_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})

# A number that stands for minus infinity: far enough below any score that its weight is 0.
_HIDDEN = -1e4


def matches(recording: Recording) -> Iterator[Match]:
    """Every product of attention weights with values."""
    for node in recording.nodes:
        if node.op == "scaled_dot_product_attention":
            yield from _with_causal_mask(node)
        elif node.op in _PRODUCTS and node.outputs:
            found = _Attention(node).found()
            if found is not None:
                yield found


@dataclass(frozen=True)
class _Operand:
    """A tensor, and the order that brings it to [..., length, size]."""

    value: Value
    order: tuple[int, ...] | None = None

    def piece(self, role: str) -> Of:
        return Of(self.value, role, "" if self.order is None else _permuted(self.order))

    @property
    def shape(self) -> tuple[int, ...]:
        order = self.order or range(len(self.value.shape))
        return tuple(self.value.shape[each] for each in order)


def _permuted(order: tuple[int, ...]) -> str:
    """The shortest call that puts dimensions in ``order``."""
    moved = [index for index, each in enumerate(order) if index != each]
    if not moved:
        return ""
    if len(moved) == 2:
        last = len(order) - 2
        pair = (-2, -1) if moved[0] == last else (moved[0], moved[1])
        return f".transpose({pair[0]}, {pair[1]})"
    return f".permute({', '.join(map(str, order))})"


@dataclass
class _Attention:
    product: Node
    nodes: set[Node] = field(default_factory=set)
    optional: set[Node] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    scale: tuple[Piece, ...] | None = None
    dropout: tuple[Piece, ...] | None = None
    mask: tuple[Piece, ...] | None = None
    causal: bool = False
    shape: tuple[int, int] = (0, 0)  # queries, keys

    def found(self) -> Match | None:
        """The match that ends in this product; None where it is none at all."""
        sides = _sides(self.product)
        if sides is None:
            return None
        weights, value, suffix = sides
        probabilities = self._through_dropout(weights.value)
        softmax = probabilities.producer if probabilities is not None else None
        if softmax is None or softmax.op != "softmax" or not softmax.inputs:
            return None
        scores = self._scores(softmax.inputs[0])
        if scores is None:
            return None
        self.nodes |= {self.product, softmax}
        if dimension(softmax) != -1:
            self.reasons.append("the softmax is not over the last dimension")
        factors = _factors(scores)
        if factors is None:
            return None
        query, key, extra = factors
        assert scores.producer is not None
        self.nodes |= {scores.producer, *extra}
        if weights.order is not None and weights.order != tuple(range(len(weights.value.shape))):
            self.reasons.append("the weights are transposed before the product with the values")
        if scores.producer.op == "baddbmm":
            self._added_in_product(scores.producer)
        self._check(query, key, value)
        return self._match(query, key, value, suffix)

    def _through_dropout(self, value: Value) -> Value | None:
        """Back from the weights to the softmax, over casts and dropout."""
        while value.producer is not None:
            node = value.producer
            source = cast_source(value)
            if source is not None or (node.op in COPIES and not node.changed):
                self.nodes.add(node)
                value = source or node.inputs[0]
            elif node.op == "dropout":
                if self.dropout is not None:
                    self.reasons.append("dropout is applied twice")
                if isinstance(argument(node, 1, "p", 0.5), Value):
                    self.reasons.append("the share dropped is a tensor")
                share = Setting(node, "p", Scalar(node, 1, "p", "0.5"))
                training = Setting(node, "training", Scalar(node, 2, "training", "True"))
                self.dropout = (share, " if ", training, " else 0.0")
                self.nodes.add(node)
                value = node.inputs[0]
            else:
                return value
        return value

    def _scores(self, value: Value) -> Value | None:
        """Back from the softmax to the product, over casts, scale and masks."""
        self.shape = (value.shape[-2], value.shape[-1]) if len(value.shape) >= 2 else (0, 0)
        while True:
            node = value.producer
            if node is None or not node.inputs:
                return None
            if node.op in _PRODUCTS:
                return value
            source = cast_source(value)
            if source is None and node.op in COPIES and not node.changed:
                source = node.inputs[0]
            if source is None:
                source = self._scaled(node) or self._masked(node)
            if source is None:
                return None
            self.nodes.add(node)
            value = source

    def _scaled(self, node: Node) -> Value | None:
        if node.op not in {"mul", "div"} or len(node.args) < 2:
            return None
        tensor, by = node.args[0], node.args[1]
        if not isinstance(tensor, Value):
            tensor, by = by, tensor
        if not isinstance(tensor, Value):
            return None
        if isinstance(by, Value) and by.shape == () and not isinstance(tensor, Value):
            tensor, by = by, tensor
        if isinstance(by, Value) and not (by.shape == () and number(by) is not None):
            if tensor.shape == () and number(tensor) is not None:
                tensor, by = by, tensor
            else:
                return self._refused_scale(tensor, by)
        if number(by) is None:
            return None
        if self.scale is not None:
            self.reasons.append("the scores are scaled twice")
        if self.mask is not None and self.mask[-1] == ")" and "additive" in str(self.mask[0]):
            self.reasons.append("a mask is added before the scores are scaled")
        position = 1 if node.args[0] is tensor else 0
        text = Scalar(node, position)
        self.scale = ("1.0 / (", text, ")") if node.op == "div" else (text,)
        return tensor

    def _refused_scale(self, tensor: Value, by: Value) -> Value | None:
        """Scores times a tensor: a learnt temperature, weights of heads."""
        scores = next((each for each in (tensor, by) if each.shape[-2:] == self.shape), None)
        if scores is not None:
            self.reasons.append("the scores are multiplied with a tensor")
        return scores

    def _masked(self, node: Node) -> Value | None:
        if node.op == "masked_fill" and len(node.args) + len(node.kwargs) >= 3:
            fill = argument(node, 2, "value")
            return self._hidden(node, node.args[0], argument(node, 1, "mask"), fill, hides=True)
        if node.op == "where" and len(node.args) == 3:
            condition, yes, no = node.args
            if isinstance(yes, Value) and number(no) is not None:
                return self._hidden(node, yes, condition, no, hides=False)
            if isinstance(no, Value) and number(yes) is not None:
                return self._hidden(node, no, condition, yes, hides=True)
            return None
        if node.op == "add" and len(node.args) == 2 and not node.kwargs:
            return self._added(node)
        return None

    def _hidden(self, node: Node, scores: object, mask: object, fill: object, *, hides: bool) -> Value | None:
        """Scores at chosen places replaced by a number."""
        if not isinstance(scores, Value) or not isinstance(mask, Value):
            return None
        depth = number(fill)
        if depth is None or depth > _HIDDEN:
            self.reasons.append(f"masked scores become {depth}, which does not hide them")
        mask, hides = self._peeled(mask, hides)
        self._set_mask(mask, "nonzero" if hides else "zero", finite=depth is not None and math.isfinite(depth))
        return scores

    def _peeled(self, mask: Value, hides: bool) -> tuple[Value, bool]:
        """The tensor a condition looks at: ``bias`` of ``bias == 0``."""
        while mask.producer is not None and not mask.producer.changed:
            node = mask.producer
            if node.op in {"eq", "ne"} and len(node.args) == 2 and number(node.args[1]) == 0.0:
                hides = hides if node.op == "ne" else not hides
            elif node.op == "logical_not":
                if node.inputs[0].dtype is not torch.bool:
                    break
                hides = not hides
            elif node.op not in {"bool", "to"} or mask.dtype is not torch.bool or mask.shape != node.inputs[0].shape:
                break
            self.nodes.add(node)
            mask = node.inputs[0]
        return mask, hides

    def _added(self, node: Node) -> Value | None:
        """Scores plus a bias; which is which is told by where the product is."""
        one, other = node.args
        if not isinstance(one, Value) or not isinstance(other, Value):
            return None
        scores, bias = (one, other) if _leads_to_product(one) else (other, one)
        if not _leads_to_product(scores):
            return None
        self._set_mask(bias, "additive", finite=False)
        return scores

    def _added_in_product(self, node: Node) -> None:
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if number(beta) not in (0.0, 1.0) or number(alpha) is None:
            self.reasons.append("baddbmm scales what it adds")
        if number(beta) == 1.0 and isinstance(node.args[0], Value):
            self._set_mask(node.args[0], "additive", finite=False)
        if self.scale is not None:
            self.reasons.append("the scores are scaled twice")
        self.scale = (Scalar(node, 4, "alpha", "1.0"),)

    def _set_mask(self, mask: Value, kind: str, *, finite: bool) -> None:
        tensor = None if mask.requires_grad else remade(mask)
        causal = tensor is not None and _is_causal(tensor, kind, self.shape)
        if causal and not made_from(mask):
            self.causal = True
            self.optional |= makers(mask)
            return
        if self.mask is not None:
            self.reasons.append("there are two masks")
        settings = {"zero": ', hides="zero"', "nonzero": ', hides="nonzero"', "additive": ""}[kind]
        if finite and kind != "additive":
            settings += ", finite=True"
        self.mask = ("attention_mask", "(", Of(mask, "mask"), f"{settings})")

    def _check(self, query: _Operand, key: _Operand, value: _Operand) -> None:
        output = self.product.output
        if len({query.value.dtype, key.value.dtype, value.value.dtype, output.dtype}) != 1:
            self.reasons.append("queries, keys and values have different dtypes")
        if not (len(query.shape) == len(key.shape) == len(value.shape)) or len(query.shape) < 3:
            self.reasons.append("queries, keys and values have different numbers of dimensions")
        elif not (query.shape[:-2] == key.shape[:-2] == value.shape[:-2]):
            self.reasons.append("queries, keys and values have different batches or heads")

    def _match(self, query: _Operand, key: _Operand, value: _Operand, suffix: str) -> Match:
        arguments = [
            Argument("", (each.piece(role),)) for each, role in ((query, "query"), (key, "key"), (value, "value"))
        ]
        helpers: tuple[str, ...] = ()
        if self.dropout is not None:
            arguments.append(Argument("dropout_p", self.dropout))
        if self.causal:
            arguments.append(Argument("is_causal", ("True",)))
        arguments.append(Argument("scale", self.scale or ("1.0",)))
        if self.mask is not None:
            arguments.append(Argument("**", self.mask))
            helpers = ("attention_mask",)
        return Match(
            RECIPE,
            "attention",
            tuple(arguments),
            frozenset(self.nodes),
            self.product.output,
            frozenset(self.optional - self.nodes),
            helpers,
            suffix,
            self.reasons,
        )


def _leads_to_product(value: Value) -> bool:
    """Whether a product of two tensors stands behind, over what may stand between it and the softmax."""
    while value.producer is not None:
        node = value.producer
        if node.op in _PRODUCTS:
            return True
        if node.op not in {"mul", "div", "add", "masked_fill", "where", *COPIES} and cast_source(value) is None:
            return False
        read = [each for each in node.inputs if each.shape == value.shape]
        if len(read) > 1:
            return any(_leads_to_product(each) for each in read)
        if not read:
            return False
        value = read[0]
    return False


def _sides(node: Node) -> tuple[_Operand, _Operand, str] | None:
    """Weights, values and what must be called on the result, of a product with values."""
    if node.op in {"matmul", "bmm"}:
        if len(node.inputs) != 2:
            return None
        return _Operand(node.inputs[0]), _Operand(node.inputs[1]), ""
    if node.op != "einsum":
        return None
    parsed = _equation(node)
    if parsed is None:
        return None
    (one, other), out = parsed
    for weights, value, first in ((one, other, 0), (other, one, 1)):
        shared = [label for label in weights if label in value and label not in out]
        own = [label for label in weights if label in out and label not in value]
        size = [label for label in value if label in out and label not in weights]
        if len(shared) == len(own) == len(size) == 1:
            batch = [label for label in weights if label in value and label in out]
            if list(weights) != [*batch, own[0], shared[0]]:
                continue
            result = [*batch, own[0], size[0]]
            order = tuple(value.index(label) for label in [*batch, shared[0], size[0]])
            suffix = _permuted(tuple(result.index(label) for label in out))
            return _Operand(node.inputs[first]), _Operand(node.inputs[1 - first], order), suffix
    return None


def _factors(scores: Value) -> tuple[_Operand, _Operand, set[Node]] | None:
    """Queries, keys and the transposition that goes, of a product whose result are scores."""
    node = scores.producer
    assert node is not None
    if node.op in {"matmul", "bmm", "baddbmm"}:
        query, turned = node.inputs[-2:]
        key = swaps_last_two(turned)
        if key is not None and turned.producer is not None and turned.users == [node] and not turned.alive:
            return _Operand(query), _Operand(key), {turned.producer}
        rank = len(turned.shape)
        return _Operand(query), _Operand(turned, (*range(rank - 2), rank - 1, rank - 2)), set()
    parsed = _equation(node)
    if parsed is None:
        return None
    labels, out = parsed
    if len(out) < 3:
        return None
    rows, columns, batch = out[-2], out[-1], out[:-2]
    found: dict[str, _Operand] = {}
    for given, value in zip(labels, node.inputs, strict=True):
        for own, role in ((rows, "query"), (columns, "key")):
            size = [label for label in given if label not in out]
            if own in given and len(size) == 1 and set(given) == {*batch, own, size[0]}:
                found[role] = _Operand(value, tuple(given.index(label) for label in [*batch, own, size[0]]))
    return (found["query"], found["key"], set()) if len(found) == 2 else None


def _equation(node: Node) -> tuple[tuple[str, str], str] | None:
    """The labels of a product of two tensors by einsum."""
    text = node.args[0] if node.args else None
    if not isinstance(text, str) or "->" not in text or "..." in text or len(node.inputs) != 2:
        return None
    given, _, out = text.replace(" ", "").partition("->")
    one, _, other = given.partition(",")
    if not other or any(len(set(labels)) != len(labels) for labels in (one, other, out)):
        return None
    return (one, other), out


def _is_causal(mask: torch.Tensor, kind: str, shape: tuple[int, int]) -> bool:
    """Whether a mask hides exactly what comes after, for as many queries as keys."""
    rows, columns = shape
    if rows != columns or rows < 2 or tuple(mask.shape[-2:]) != shape or mask.numel() != rows * columns:
        return False
    mask = mask.reshape(shape)
    if kind == "additive":
        seen, hidden = mask == 0, mask <= _HIDDEN
        if not bool((seen | hidden).all()):
            return False
    else:
        seen = mask != 0 if kind == "zero" else mask == 0
    return bool(torch.equal(seen, torch.ones_like(seen).tril()))


def _with_causal_mask(node: Node) -> Iterator[Match]:
    """SDPA with a mask that says what ``is_causal`` says."""
    mask = argument(node, 3, "attn_mask")
    if not isinstance(mask, Value) or mask.requires_grad or argument(node, 5, "is_causal", False):
        return
    query, key, value = node.inputs[:3]
    shape = (query.shape[-2], key.shape[-2])
    kind = "zero" if mask.dtype is torch.bool else "additive"
    tensor = remade(mask)
    if tensor is None or not _is_causal(tensor, kind, shape):
        return
    arguments = [Argument("", (Of(each, role),)) for each, role in ((query, "query"), (key, "key"), (value, "value"))]
    if argument(node, 4, "dropout_p", 0.0) or "dropout_p" in node.kwargs:
        arguments.append(Argument("dropout_p", (Scalar(node, 4, "dropout_p", "0.0"),)))
    for position, name, default in ((6, "scale", None), (7, "enable_gqa", False)):
        if argument(node, position, name, default) != default:
            arguments.append(Argument(name, (Scalar(node, position, name, str(default)),)))
    helpers: tuple[str, ...] = ()
    optional: set[Node] = set()
    if made_from(mask):
        settings = ', hides="zero"' if kind == "zero" else ""
        arguments.append(Argument("**", ("attention_mask", "(", Of(mask, "mask"), f"{settings})")))
        helpers = ("attention_mask",)
    else:
        arguments.append(Argument("is_causal", ("True",)))
        optional = makers(mask)
    yield Match(RECIPE, "attention", tuple(arguments), frozenset({node}), node.output, frozenset(optional), helpers)
