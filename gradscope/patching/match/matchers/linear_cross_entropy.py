"""A head whose logits reach a cross-entropy: the product of hidden states with the vocabulary's weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gradscope.ops import LOSSES
from gradscope.patching.match.graph import number, swaps_last_two
from gradscope.patching.match.match import Argument, Given, Layer, Match, Of, why_idle
from gradscope.recipes.lazy_steps import CASTS, COPIES, RESHAPES, TURNS, classes_after, is_bias
from gradscope.recording.graph import HALVES, Node, Recording, Value

RECIPE = "linear_cross_entropy"


_FLOATS = (*HALVES, torch.float32, torch.float64)


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every head whose logits a loss reads."""
    for node in recording.nodes:
        head = _head(node)
        if head is None:
            continue
        reached = losses_of(node.output, len(node.output.shape) - 1)
        if reached.losses:
            yield _match(recording, head, reached)


def lazily_read(recording: Recording) -> set[Node]:
    """The losses that a replaced head, or one that can be replaced, serves."""
    found: set[Node] = set()
    for match in matches(recording):
        if not match.reasons:
            product = next(node for node in match.nodes if _head(node) is not None)
            found |= set(losses_of(product.output, len(product.output.shape) - 1).losses)
    for node in recording.nodes:
        if node.op == "lazy_linear":
            found |= set(losses_of(node.output, len(node.output.shape) - 1).losses)
    return found


@dataclass
class Reached:
    """Who reads logits, over views, casts and a logarithmic softmax."""

    losses: list[Node] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)
    between: set[Node] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)  # why a loss cannot do without the logits


@dataclass(frozen=True)
class _Head:
    product: Node
    hidden: Value
    weight: Value
    bias: Value | None = None
    suffix: str = ""  # of the weight, which brings it to [classes, features]
    turned: Node | None = None  # the transposition that goes


def losses_of(logits: Value, classes: int, logarithmic: bool = False) -> Reached:
    """Return everything that reads ``logits``, whose dimension ``classes`` holds the classes."""
    reached = Reached()
    left = [(node, logits, classes, logarithmic) for node in reversed(logits.users)]
    while left:
        node, value, classes, logarithmic = left.pop()
        if node.op in LOSSES and node.args and node.args[0] is value:
            if node.op == ("nll_loss" if logarithmic else "cross_entropy"):
                reached.losses.append(node)
                reached.reasons += _why_not(node, classes)
            else:
                reached.others.append(node)
            continue
        after = _after(node, value, classes, logarithmic)
        if after is None:
            reached.others.append(node)
        else:
            reached.between.add(node)
            again = logarithmic or node.op == "log_softmax"
            left += [(user, node.output, after, again) for user in reversed(node.output.users)]
    return reached


def _after(node: Node, value: Value, classes: int, logarithmic: bool) -> int | None:
    """The dimension of the classes in what the call makes of ``value``; None where that has to be computed."""
    if node.changed or len(node.outputs) != 1 or not any(each is value for each in node.args[:2]):
        return None
    rank, result = len(value.shape), node.output
    if node.op == "add":
        bias = node.args[1] if node.args[0] is value else node.args[0]
        fits = (
            isinstance(bias, Value) and bias.dtype == value.dtype == result.dtype and is_bias(bias.shape, value.shape)
        )
        return classes if fits and classes == rank - 1 and not logarithmic and not node.kwargs else None
    if node.args[0] is not value:
        return None
    if result.dtype != value.dtype and not (value.dtype in HALVES and result.dtype == torch.float32):
        return None
    if node.op == "log_softmax":
        over = node.argument(1, "dim")
        same = isinstance(over, int) and -rank <= over < rank and over % rank == classes
        return classes if same and not logarithmic else None
    if node.op not in RESHAPES | TURNS | CASTS | COPIES | {"getitem"} or len(node.inputs) > 1:
        return None
    if result.device != value.device:
        return None
    return classes_after(node.op, node.args[1:], node.kwargs, value.shape, classes, result.shape)


def _why_not(loss: Node, classes: int) -> list[str]:
    logits, target, weight = loss.args[0], loss.argument(1, "target"), loss.argument(2, "weight")
    found = []
    if classes != min(1, len(logits.shape) - 1):
        found.append("the loss and the head have the classes in different dimensions")
    if isinstance(target, Value) and target.dtype.is_floating_point:
        found.append("the targets are probabilities")
    elif isinstance(target, Value) and target.dtype != torch.int64:
        found.append(f"the targets are {str(target.dtype).removeprefix('torch.')}")
    if isinstance(weight, Value) and weight.requires_grad:
        found.append("the class weights require a gradient")
    if loss.argument(3, "size_average") is not None or loss.kwargs.get("reduce") is not None:
        found.append("size_average and reduce are not supported")
    return found


def _match(recording: Recording, head: _Head, reached: Reached) -> Match:
    product = head.product
    nodes, reasons = {product}, list(reached.reasons)
    output = product.output
    if reached.others:
        reasons.append(f"the logits are also read by {reached.others[0].op}")
    if len(reached.losses) > 1:
        reasons.append("two losses read the logits, so they would be computed twice")
    if head.hidden.dtype not in _FLOATS:
        reasons.append(f"the head's input is {str(head.hidden.dtype).removeprefix('torch.')}")
    reasons += _changed_later(recording, head, reached)
    if product.caller is not None:
        if type(product.caller).forward not in (torch.nn.Linear.forward, torch.nn.Sequential.forward):
            reasons.append(f"the module that computes the logits is a {type(product.caller).__name__}")
        nodes = _whole_call(product)
        # What a wrapping module calls behind it may make nothing, as where FSDP frees its parameters.
        last = max((node for node in nodes if node.outputs), key=lambda node: node.index)
        output = last.output
        if not nodes - {product} <= reached.between | _before(product):
            reasons.append(f"the module that computes the logits also calls {last.op}")
        arguments = (
            Argument("", (Layer(product, certain=False),)),
            Argument("", (Given(product, names=frozenset({"input"})),)),
        )
    else:
        if head.turned is not None:
            nodes.add(head.turned)
        given = [Argument("", (Of(head.weight, "weight", head.suffix),)), Argument("", (Of(head.hidden, "hidden"),))]
        if head.bias is not None:
            given.append(Argument("", (Of(head.bias, "bias"),)))
        arguments = tuple(given)  # type: ignore[assignment]
    return Match(
        RECIPE, "lazy_linear", arguments, frozenset(nodes), output, reasons=reasons, idle=_idle(product.output)
    )


def _idle(logits: Value) -> str:
    return why_idle(RECIPE, logits, logits=math.prod(logits.shape), rows=math.prod(logits.shape[:-1]))


def _changed_later(recording: Recording, head: _Head, reached: Reached) -> list[str]:
    """Say what changes an operand later: logits are computed when they are read. Optimizers come later."""
    read = {each.storage for each in (head.hidden, head.weight, head.bias) if each is not None}
    last = max(node.index for node in (*reached.losses, *reached.between))
    later = recording.nodes[head.product.index + 1 : last]
    return [f"{node.op} modifies the head's input in place" for node in later if node.changed & read][:1]


def _whole_call(product: Node) -> set[Node]:
    """Return what the module that made the matmul called beside it: a Sequential calls more than one."""
    place, found, waiting = product.places[0], {product}, [product]

    def same(node: Node | None) -> bool:
        return (
            node is not None
            and node not in found
            and node.caller is product.caller
            and bool(node.places)
            and node.places[0].frame is place.frame
            and node.places[0].span == place.span
        )

    while waiting:
        node = waiting.pop()
        beside = [value.producer for value in node.inputs] + [user for value in node.outputs for user in value.users]
        for each in beside:
            if each is not None and same(each):
                found.add(each)
                waiting.append(each)
    return found


def _before(product: Node) -> set[Node]:
    """The calls that the matmul comes from."""
    found: set[Node] = set()
    waiting = [product]
    while waiting:
        for value in waiting.pop().inputs:
            if value.producer is not None and value.producer not in found:
                found.add(value.producer)
                waiting.append(value.producer)
    return found


def _head(node: Node) -> _Head | None:
    """The operands, where it is a matmul with a weight."""
    if not node.outputs or not node.places or not node.inputs or "out" in node.kwargs:
        return None
    if node.op == "linear":
        weight, bias = node.argument(1, "weight"), node.argument(2, "bias")
        hidden = node.argument(0, "input")
        if isinstance(hidden, Value) and isinstance(weight, Value) and len(weight.shape) == 2:
            return _Head(node, hidden, weight, bias if isinstance(bias, Value) else None)
    if node.op in {"matmul", "mm"} and len(node.inputs) == 2 and not node.kwargs:
        return _product(node, node.inputs[0], node.inputs[1], None)
    if node.op == "addmm" and len(node.inputs) == 3:
        plain = number(node.kwargs.get("beta", 1)) == number(node.kwargs.get("alpha", 1)) == 1.0
        bias, hidden, matrix = node.inputs
        if plain and bias.shape == matrix.shape[1:]:
            return _product(node, hidden, matrix, bias)
    if node.op == "einsum" and len(node.inputs) == 2 and isinstance(node.args[0], str):
        return _by_labels(node, node.args[0].replace(" ", ""))
    return None


def _product(node: Node, hidden: Value, matrix: Value, bias: Value | None) -> _Head | None:
    """A matmul with a matrix [features, classes] that no call of the step made."""
    if len(matrix.shape) != 2 or len(hidden.shape) < 2:
        return None
    weight, turned = swaps_last_two(matrix), matrix.producer
    if weight is not None and turned is not None:
        here = bool(turned.places) and turned.places[0].frame is node.places[0].frame
        if weight.producer is None and here and matrix.users == [node] and not matrix.alive:
            return _Head(node, hidden, weight, bias, turned=turned)
        return None
    return _Head(node, hidden, matrix, bias, ".T") if matrix.producer is None else None


def _by_labels(node: Node, equation: str) -> _Head | None:
    given, arrow, out = equation.partition("->")
    one, comma, other = given.partition(",")
    if not arrow or not comma:
        return None
    for hidden, matrix, first in ((one, other, 0), (other, one, 1)):
        if len(matrix) != 2 or not hidden or not out or hidden[:-1] != out[:-1] or len(set(hidden)) != len(hidden):
            continue
        weight = node.inputs[1 - first]
        if set(matrix) == {hidden[-1], out[-1]} and hidden[-1] != out[-1] and weight.producer is None:
            return _Head(node, node.inputs[first], weight, None, "" if matrix[0] == out[-1] else ".T")
    return None
