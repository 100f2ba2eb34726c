"""Attention by hand: queries times keys, scaled, masked, a softmax over the keys, dropout, times values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gradscope.ops import COPIES, RESHAPES_OR_FLATTEN, RESHAPES_TO_SIZES, SCALES
from gradscope.patching.match.graph import cast_source, dimension, number
from gradscope.patching.match.masks import HIDDEN, Mask, times_mask, uniform
from gradscope.patching.match.match import Match, Piece, Scalar, Setting, Size
from gradscope.patching.match.matchers.attention_call import (
    RECIPE,
    Call,
    Cap,
    Factor,
    ScoresChain,
    weights_of,
    with_causal_mask,
)
from gradscope.patching.match.matchers.sinks import Sinks, column_of, sinks_of, unshifted, without_last
from gradscope.patching.match.products import factors, is_product, leads_to_product, sides
from gradscope.recording.graph import Node, Recording, Value

__all__ = ["RECIPE", "matches"]


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every matmul of attention weights with values."""
    for node in recording.nodes:
        if node.op == "scaled_dot_product_attention":
            yield from with_causal_mask(node)
        elif is_product(node):
            found = _Attention(node).found()
            if found is not None:
                yield found


@dataclass
class _Attention:
    product: Node
    nodes: set[Node] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    steps: list[Factor | Cap | Mask] = field(default_factory=list)  # from the softmax back
    dropout: tuple[Piece, ...] | None = None
    heads: tuple[Piece, ...] | None = None  # what the first dimension stands for, where it is unfolded
    folded: int = 0  # dimensions of the scores with heads (3) or windows (4) in the batch, where they are taken out
    shape: tuple[int, int] = (0, 0)  # queries, keys
    dropped: Node | None = None  # what drops the last column of the weights
    sinks: Sinks | None = None

    def found(self) -> Match | None:
        """The match that ends in this matmul; None where it is none at all."""
        both = sides(self.product)
        if both is None:
            return None
        weights, value, suffix = both
        probabilities = self._through_dropout(weights.value)
        softmax = probabilities.producer
        if softmax is None or softmax.op != "softmax" or not softmax.inputs or len(probabilities.shape) < 2:
            return None
        self.shape = (probabilities.shape[-2], probabilities.shape[-1] - int(self.dropped is not None))
        scores = self._scores(self._without_sinks(softmax.inputs[0]))
        if scores is None or scores.producer is None:
            return None
        self.nodes |= {self.product, softmax}
        if dimension(softmax) != -1:
            self.reasons.append("the softmax is not over the last dimension")
        if probabilities.dtype is torch.float64 and self.product.output.dtype is not torch.float64:
            self.reasons.append("the softmax is computed in float64")
        operands = factors(scores, self.product)
        if operands is None:
            return None
        query, key, transposition = operands
        self.nodes |= {scores.producer, *transposition}
        if weights.order is not None and weights.order != tuple(range(len(weights.value.shape))):
            self.reasons.append("the weights are transposed before the matmul with the values")
        if scores.producer.op == "baddbmm":
            self._added_in_product(scores.producer)
        self.steps.reverse()
        found = ScoresChain(
            self.product,
            softmax,
            self.nodes,
            self.steps,
            self.shape,
            self.dropout,
            self.heads,
            self.folded,
            suffix,
            self.reasons,
            () if self.folded else tuple(weights_of(weights.value, softmax, query, self.dropped)),
            self.sinks,
        )
        return Call(found, query, key, value).match()

    def _through_dropout(self, value: Value) -> Value:
        """Walk back from the weights to the softmax, over casts, dropout and views."""
        while value.producer is not None:
            node = value.producer
            source = cast_source(value) or self._unfolded(node, value)
            if source is not None or (node.op in COPIES and not node.changed):
                self.nodes.add(node)
                value = source or node.inputs[0]
            elif self.dropped is None and without_last(node) is not None:
                self.dropped = node
                self.nodes.add(node)
                value = node.inputs[0]
            elif node.op == "dropout":
                self._dropped(node)
                self.nodes.add(node)
                value = node.inputs[0]
            else:
                return value
        return value

    def _without_sinks(self, value: Value) -> Value:
        """The scores before sinks were joined to them, where the weights have lost their last column."""
        value, nodes = unshifted(value)
        node, found = value.producer, column_of(value.producer)
        if node is not None and found is not None:
            scores, column = found
            self.sinks = sinks_of(column)
            if self.dropped is None:
                self.reasons.append("a column is concatenated to the scores but not dropped after the softmax")
            elif self.sinks is None:
                self.reasons.append("the column concatenated to the scores is not one number per head")
            else:
                nodes |= self.sinks.nodes
            value, nodes = scores, nodes | {node}
        elif self.dropped is not None:
            self.reasons.append(
                "the attention weights drop a column that was not concatenated to the scores just before the softmax"
            )
        self.nodes |= nodes
        return value

    def _dropped(self, node: Node) -> None:
        if self.dropout is not None:
            self.reasons.append("dropout is applied twice")
        if isinstance(node.argument(1, "p", 0.5), Value):
            self.reasons.append("the dropout probability is a tensor")
        share = Setting(node, "p", Scalar(node, 1, "p", "0.5"))
        training = Setting(node, "training", Scalar(node, 2, "training", "True"))
        self.dropout = (share, " if ", training, " else 0.0")

    def _unfolded(self, node: Node, value: Value) -> Value | None:
        """Return what ``value`` is a view of that folds the heads into the batch, or takes them out of it."""
        if node.op not in RESHAPES_OR_FLATTEN or not node.inputs or node.inputs[0].shape[-2:] != value.shape[-2:]:
            return None
        source = node.inputs[0]
        few, many = sorted((len(source.shape), len(value.shape)))
        if (few, many) == (3, 4) or ((few, many) == (4, 5) and source.shape[-3:] == value.shape[-3:]):
            if self.folded not in (0, few):
                self.reasons.append("both heads and windows are folded into the batch")
            elif len(value.shape) == many:
                if few == 4 and self.heads is not None:
                    self.reasons.append("the windows are unfolded from the batch more than once")
                self.heads = _first_two(node, value) or self.heads
            self.folded = few
            return source
        return source if source.shape == value.shape else None

    def _scores(self, value: Value) -> Value | None:
        """Walk back from the softmax to the matmul, over casts, scale, masks and views."""
        while True:
            node = value.producer
            if node is None or not node.inputs:
                return None
            if is_product(node) and node.output is value:
                return value
            source = cast_source(value) or self._unfolded(node, value)
            if source is None:
                if node.op in COPIES and not node.changed:
                    source = node.inputs[0]
                else:
                    source = self._capped(node) or self._scaled(node) or self._masked(node)
                    if source is not None and source.shape != value.shape:
                        self.reasons.append(f"{node.op} changes the scores' shape")
                    source = source or self._reshaped(node)
            if source is None:
                return None
            self.nodes.add(node)
            value = source

    def _reshaped(self, node: Node) -> Value | None:
        """The scores before a view that is none of heads or windows of a batch, or before a column, to say why not."""
        source, joined = node.inputs[0], column_of(node)
        if joined is not None:
            self.reasons.append("a column is concatenated to the scores and modified with them before the softmax")
            return joined[0]
        if node.op not in RESHAPES_OR_FLATTEN or not leads_to_product(source):
            return None
        self.reasons.append(f"{node.op} reshapes the scores other than by unfolding heads or windows from the batch")
        return source

    def _capped(self, node: Node) -> Value | None:
        """The scores below ``cap * tanh(scores / cap)``."""
        if node.op == "tanh" and leads_to_product(node.inputs[0]):
            self.reasons.append("the scores go through a tanh that is not a soft-cap with one positive number")
            return node.inputs[0]
        if node.op != "mul" or len(node.args) != 2 or node.kwargs or len(node.inputs) != 1:
            return None
        position = 1 if node.args[0] is node.inputs[0] else 0
        squashed = node.inputs[0].producer
        if squashed is None or squashed.op != "tanh" or len(squashed.inputs) != 1:
            return None
        below, cap = squashed.inputs[0].producer, number(node.args[position])
        if below is None or len(below.args) != 2 or below.kwargs or len(below.inputs) != 1:
            return None
        scores = below.inputs[0]
        within = number(below.args[int(below.args[0] is scores)])
        if cap is None or cap <= 0 or within is None or not _is_inverse(below, cap, within):
            return None
        self.nodes |= {squashed, below}
        self.steps.append(Cap(node, position))
        return scores

    def _scaled(self, node: Node) -> Value | None:
        if node.op not in SCALES or len(node.args) != 2 or node.kwargs:
            return None
        one, other = node.args
        tensor, by, position = one, other, 1
        if not isinstance(one, Value) or (isinstance(other, Value) and not leads_to_product(one)):
            tensor, by, position = other, one, 0
        if not isinstance(tensor, Value) or (position == 0 and node.op == "div"):
            return None
        if not isinstance(by, Value):
            known = number(by)
            self.steps.append(Factor(node, position, node.op == "div", 0.0 if known is None else known))
            return None if known is None else tensor
        if not leads_to_product(tensor):
            return None
        made = by.producer
        if by.shape == () and made is not None and made.op in {"full", "tensor", "scalar_tensor"} and not made.inputs:
            known = number(made.argument(int(made.op == "full"), "fill_value" if made.op == "full" else "data"))
            if known is not None and by.users == [node]:
                self.nodes.add(made)
                self.steps.append(Factor(node, position, node.op == "div", known, number_node=made))
                return tensor
        if by.shape and (by.shape[-1] != 1 or len(by.shape) > len(tensor.shape)):
            if by.shape[-2:] == tensor.shape[-2:] or by.shape[-1] == tensor.shape[-1]:
                self.reasons.append("the scores are multiplied by a tensor")
                return tensor
            return None
        self.steps.append(Factor(node, position, node.op == "div", tensor=by))
        return tensor

    def _masked(self, node: Node) -> Value | None:
        if node.op == "masked_fill" and len(node.args) + len(node.kwargs) == 3:
            fill = node.argument(2, "value")
            return self._hidden(node.args[0], node.argument(1, "mask"), fill, hides=True)
        if node.op == "where" and len(node.args) == 3:
            condition, yes, no = node.args
            if node.function is torch.Tensor.where:
                condition, yes = yes, condition
            if isinstance(yes, Value) and uniform(no)[0] is not None:
                return self._hidden(yes, condition, no, hides=False)
            if isinstance(no, Value) and uniform(yes)[0] is not None:
                return self._hidden(no, condition, yes, hides=True)
            return None
        if node.op == "setitem":
            return self._assigned(node)
        if node.op in {"add", "sub"} and len(node.args) == 2 and not node.kwargs:
            return self._added(node)
        return None

    def _hidden(self, scores: object, mask: object, given: object, *, hides: bool) -> Value | None:
        """Return the scores behind a call that replaces some by a number."""
        if not isinstance(scores, Value) or not isinstance(mask, Value) or not leads_to_product(scores):
            return None
        fill, makers = uniform(given)
        if fill is None:
            return None
        if fill > HIDDEN:
            self.reasons.append(f"masked scores become {fill}, which does not mask them out")
        self.nodes |= makers
        mask, hides = self._peeled(mask, hides)
        self._add_mask(Mask(mask, "nonzero" if hides else "zero", fill, rank=len(scores.shape)))
        return scores

    def _assigned(self, node: Node) -> Value | None:
        """Match ``scores[:, :, mask] = number``, or rows and columns in place of the mask."""
        scores, index, fill = node.args
        depth = number(fill)
        if not isinstance(scores, Value) or depth is None or not leads_to_product(scores):
            return None
        if depth > HIDDEN:
            self.reasons.append(f"masked scores become {depth}, which does not mask them out")
        parts = list(index) if isinstance(index, tuple) else [index]
        tensors = [part for part in parts if isinstance(part, Value)]
        others = [part for part in parts if not isinstance(part, Value)]
        plain = all(part is Ellipsis or part == slice(None) for part in others)
        plain = plain and tensors == parts[len(others) :]
        rank = len(scores.shape)
        if plain and len(tensors) == 1 and tensors[0].dtype is torch.bool:
            mask = tensors[0]
            if len(mask.shape) >= 2 and (Ellipsis in others or len(others) + len(mask.shape) == rank):
                self._add_mask(Mask(mask, "nonzero", depth, rank=rank))
                return scores
        indexed = all(part.dtype is torch.int64 for part in tensors)
        if plain and len(tensors) == 2 and indexed and (Ellipsis in others or len(others) == rank - 2):
            self._add_mask(Mask(tensors[0], "nonzero", depth, rank=rank, positions=(tensors[0], tensors[1])))
            return scores
        self.reasons.append("scores are assigned by index")
        return scores

    def _peeled(self, mask: Value, hides: bool) -> tuple[Value, bool]:
        """The tensor a condition looks at, ``bias`` of ``bias == 0``, where the condition is made here and for this."""
        while mask.producer is not None and not mask.producer.changed:
            node = mask.producer
            here = node.places and node.places[0].frame is self.product.places[0].frame
            if not here or len(mask.users) != 1 or mask.alive or mask.dtype is not torch.bool:
                break
            if node.op in {"eq", "ne"} and len(node.args) == 2 and number(node.args[1]) == 0.0:
                hides = hides if node.op == "ne" else not hides
            elif node.op == "logical_not" and node.inputs[0].dtype is torch.bool:
                hides = not hides
            elif node.op not in {"bool", "to"} or len(node.inputs) != 1 or mask.device != node.inputs[0].device:
                break
            if mask.shape != node.inputs[0].shape:
                break
            self.nodes.add(node)
            mask = node.inputs[0]
        return mask, hides

    def _added(self, node: Node) -> Value | None:
        """Return the scores behind a sum with a bias; which is which is told by where the matmul is."""
        one, other = node.args
        if not isinstance(one, Value) or not isinstance(other, Value):
            return None
        scores, bias = (one, other) if leads_to_product(one) else (other, one)
        if not leads_to_product(scores) or (node.op == "sub" and scores is other):
            return None
        times = times_mask(node, scores, bias, self.shape)
        if times is not None:
            below, mask, makers = times
            self.nodes |= makers
            self._add_mask(mask)
            return below
        self._add_mask(Mask(bias, "", negative=node.op == "sub", rank=len(scores.shape)))
        return scores

    def _add_mask(self, mask: Mask) -> None:
        if len(mask.value.shape) < 2 and mask.positions is None:
            self.reasons.append("the mask has only one dimension")
        if len(mask.value.shape) > mask.rank:
            self.reasons.append("the mask has more dimensions than the scores")
        if not mask.hides and mask.value.dtype not in (torch.float32, self.product.output.dtype):
            self.reasons.append(f"the tensor added to the scores is {str(mask.value.dtype).removeprefix('torch.')}")
        self.steps.append(mask)

    def _added_in_product(self, node: Node) -> None:
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if number(beta) not in (0.0, 1.0) or number(alpha) is None:
            self.reasons.append("baddbmm scales the tensor it adds")
            return
        added = node.args[0]
        if number(beta) == 1.0 and isinstance(added, Value):
            made = added.producer
            if made is not None and made.op == "zeros" and not made.inputs and not made.changed:
                if added.users == [node] and not added.alive:
                    self.nodes.add(made)
                else:
                    self.reasons.append("baddbmm adds a tensor that is used elsewhere")
            else:
                self._add_mask(Mask(added, "", rank=3))
        self.steps.append(Factor(node, 4, divides=False, value=number(alpha) or 0.0))


def _first_two(node: Node, made: Value) -> tuple[Piece, ...] | None:
    """The first two sizes of what a view made; None where they are not written out."""
    if node.op in {"view", "reshape"} and len(node.args) == len(made.shape) + 1:
        return (Scalar(node, 1), ", ", Scalar(node, 2))
    if len(made.shape) == 5 and node.op in RESHAPES_TO_SIZES:
        count = 2 if node.op == "unflatten" else 5
        return ("-1, ", Size(node, 1, count, made.shape[1]))
    return None


def _is_inverse(node: Node, cap: float, within: float) -> bool:
    """Return whether it divides by ``cap``: by the number itself, or times its inverse."""
    if node.op == "mul":
        return math.isclose(within * cap, 1.0, rel_tol=1e-12)
    return node.op == "div" and within == cap and isinstance(node.args[0], Value)
