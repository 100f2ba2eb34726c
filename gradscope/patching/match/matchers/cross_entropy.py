"""A cross-entropy whose logits are needed anyway: of no single product, or of one that others read too."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradscope import recipes
from gradscope.patching.match.match import Argument, Given, Match, Of, Scalar, Setting, why_idle
from gradscope.patching.match.matchers import gathered_loss
from gradscope.patching.match.matchers.linear_cross_entropy import lazily_read
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "cross_entropy"

_MANY = 1 << 30  # rows of two logits, which take no memory: more than any rule asks for
_SETTINGS = ("weight", "ignore_index", "reduction", "label_smoothing")


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every loss of logits that stay."""
    lazy = lazily_read(recording)
    for node in recording.nodes:
        if node in lazy or not node.places or not node.args:
            continue
        if node.op == "cross_entropy":
            yield from _cross_entropy(node)
        elif node.op == "nll_loss":
            yield from _nll(node)
    yield from gathered_loss.matches(recording, _gains)


def _cross_entropy(node: Node) -> Iterator[Match]:
    logits = node.args[0]
    if not isinstance(logits, Value) or not _gains(logits):
        return
    if node.caller is None:
        names = frozenset({"input", "target", *_SETTINGS})
        arguments: tuple[Argument, ...] = (Argument("", (Given(node, 3, names),)),)
    else:
        arguments = (Argument("", (Given(node, 2, frozenset({"input", "target"})),)), *_of_module(node, _SETTINGS))
    reasons = _why_not(node, torch.nn.CrossEntropyLoss)
    idle = _idle(logits)
    yield Match(RECIPE, "cross_entropy", arguments, frozenset({node}), node.output, reasons=reasons, idle=idle)


def _nll(node: Node) -> Iterator[Match]:
    """The loss of a logarithmic softmax that nobody else reads."""
    probabilities = node.args[0]
    softmax = probabilities.producer if isinstance(probabilities, Value) else None
    if softmax is None or softmax.op != "log_softmax" or not _gains(softmax.inputs[0]):
        return
    rank, over = len(probabilities.shape), softmax.argument(1, "dim")
    reasons = _why_not(node, torch.nn.NLLLoss)
    if not isinstance(over, int) or over % rank != min(1, rank - 1):
        reasons.append("the softmax and the loss use different dimensions")
    if gathered_loss.gives_a_dtype(softmax) or probabilities.dtype != softmax.inputs[0].dtype:
        reasons.append("log_softmax changes the dtype")
    logits = Argument("", (Of(softmax.inputs[0], "logits"),))
    if node.caller is None:
        rest: tuple[Argument, ...] = (Argument("", (Given(node, 3, frozenset({"target", *_SETTINGS[:3]}), 1),)),)
    else:
        target = node.argument(1, "target")
        rest = (Argument("", (Of(target, "target"),)), *_of_module(node, _SETTINGS[:3]))
    idle, nodes = _idle(softmax.inputs[0]), frozenset({softmax, node})
    yield Match(RECIPE, "cross_entropy", (logits, *rest), nodes, node.output, reasons=reasons, idle=idle)


def _of_module(node: Node, names: tuple[str, ...]) -> tuple[Argument, ...]:
    """The settings of the module that made the call, which a name of the function's own may hold."""
    return tuple(Argument(name, (Setting(node, name, Scalar(node, 2, name)),)) for name in names)


def _idle(logits: Value) -> str:
    return why_idle(RECIPE, logits, logits=math.prod(logits.shape))


def _gains(logits: Value) -> bool:
    """Return whether the recipe differs from torch, for enough logits: :func:`_idle` asks how many there are."""
    device = logits.device
    if device.type not in {"cpu", "cuda"} or not logits.dtype.is_floating_point or len(logits.shape) == 0:
        return False
    row = torch.empty((1, 2), dtype=logits.dtype, device=device), torch.empty(1, dtype=torch.int64, device=device)
    try:
        return recipes.cross_entropy.explain(row[0].expand(_MANY, 2), row[1].expand(_MANY)).backend != "torch"
    except ValueError:
        return False


def _why_not(node: Node, module: type[torch.nn.Module]) -> list[str]:
    target, weight = node.argument(1, "target"), node.argument(2, "weight")
    found = []
    if isinstance(target, Value) and target.dtype.is_floating_point:
        found.append("the targets are probabilities")
    elif isinstance(target, Value) and target.dtype != torch.int64:
        found.append(f"the targets are {str(target.dtype).removeprefix('torch.')}")
    if isinstance(weight, Value) and weight.requires_grad:
        found.append("the class weights require a gradient")
    if node.argument(3, "size_average") is not None or node.kwargs.get("reduce") is not None:
        found.append("size_average and reduce are not supported")
    if node.caller is not None and type(node.caller) is not module:
        found.append(f"it is called by {type(node.caller).__name__}")
    return found
