"""An embedding whose weight is also the head's: both give the one parameter a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradscope.ops import CASTS, COPIES, MATMULS
from gradscope.patching.match.match import Argument, Match, Of, Scalar, Setting
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "embedding"

_SAME_NUMBERS = frozenset({"t", "T", "mT", "transpose", "permute", "view", "reshape", "unsqueeze", "expand", "getitem"})

# Measured on two cores, float32: x0.6 to x0.95 below either, x1.2 from 2 rows a token on, x1.6 from 4 on.
FEWEST_ROWS_A_TOKEN, FEWEST_ON_CPU = 2, 500_000

# Added row by row, a narrower type's gradient would be rounded every time.
_EXACT = (torch.float32, torch.float64)

# (position, name, default): what the recipe leaves to torch.
_LEFT_TO_TORCH = ((3, "max_norm", None), (5, "scale_grad_by_freq", False), (6, "sparse", False))


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every embedding by a parameter that some matmul reads too."""
    heads = {root.content[0] for node in recording.nodes if node.op in MATMULS for root in map(_root, node.inputs)}
    for node in recording.nodes:
        weight = node.argument(1, "weight") if node.op == "embedding" else None
        if isinstance(weight, Value) and weight.content[0] in heads and _gains(weight, node):
            yield _match(node)


def _root(value: Value) -> Value:
    """The tensor whose numbers ``value`` shows, whatever its shape or dtype."""
    while value.producer is not None and value.producer.inputs and not value.producer.changed:
        if value.producer.op not in _SAME_NUMBERS | CASTS | COPIES:
            break
        value = value.producer.inputs[0]
    return value


def _gains(weight: Value, node: Node) -> bool:
    """Return whether the weight is a parameter into whose gradient rows can be added."""
    tensor = weight.tensor()
    return tensor is not None and tensor.is_leaf and weight.requires_grad and weight.dtype in _EXACT and node.grad


def _match(node: Node) -> Match:
    arguments = [
        Argument("", (Of(node.inputs[0], "tokens"),)),
        Argument("", (Setting(node, "weight", Scalar(node, 1, "weight")),)),
    ]
    if node.argument(2, "padding_idx") is not None:
        arguments.append(Argument("padding_idx", (Setting(node, "padding_idx", Scalar(node, 2, "padding_idx")),)))
    reasons = [
        f"the embedding uses {name}, which only its own kernel supports"
        for position, name, default in _LEFT_TO_TORCH
        if node.argument(position, name, default) != default
    ]
    return Match(
        RECIPE, "embedding", tuple(arguments), frozenset({node}), node.output, reasons=reasons, idle=_idle(node)
    )


def _idle(node: Node) -> str:
    ids, weight = node.inputs[0], node.argument(1, "weight")
    if weight.device.type != "cpu":
        return ""
    rows, tokens = weight.shape[0], math.prod(ids.shape)
    if rows >= FEWEST_ROWS_A_TOKEN * tokens and math.prod(weight.shape) >= FEWEST_ON_CPU:
        return ""
    return f"a dense gradient of {rows:,} rows for {tokens:,} tokens is faster on the CPU"
