"""torch's own attention that is given a causal mask, where it could be told that it is causal."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradscope.patching.match import Argument, Match, Of, Scalar
from gradscope.patching.matchers.attention_call import RECIPE
from gradscope.patching.matchers.masks import Mask, causal
from gradscope.recording.graph import Node, Value


def with_causal_mask(node: Node) -> Iterator[Match]:
    """SDPA with a mask that says what ``is_causal`` says."""
    mask = node.argument(3, "attn_mask")
    if not isinstance(mask, Value) or mask.requires_grad or node.argument(5, "is_causal", False) or not node.places:
        return
    query, key, value = node.inputs[:3]
    shape = (query.shape[-2], key.shape[-2])
    given = Mask(mask, "zero" if mask.dtype is torch.bool else "", -math.inf)
    if not given.is_causal_now(shape):
        return
    arguments = [Argument("", (Of(each, role),)) for each, role in ((query, "query"), (key, "key"), (value, "value"))]
    if node.argument(4, "dropout_p", 0.0) or "dropout_p" in node.kwargs:
        arguments.append(Argument("dropout_p", (Scalar(node, 4, "dropout_p", "0.0"),)))
    for position, name, default in ((6, "scale", None), (7, "enable_gqa", False)):
        if node.argument(position, name, default) != default:
            arguments.append(Argument(name, (Scalar(node, position, name, str(default)),)))
    settings = ', hides="zero"' if given.hides else ""
    looked = Argument("**", ("attention_mask", "(", Of(mask, "mask"), f"{settings})"))
    plain = Match(
        RECIPE, "attention", (*arguments, looked), frozenset({node}), node.output, helpers=("attention_mask",)
    )
    made = causal(given, shape, node.places[0].frame)
    if made is None:
        yield plain
        return
    told = (*arguments, Argument("is_causal", ("True",)))
    yield Match(
        RECIPE,
        "attention",
        told,
        frozenset({node}) | made.nodes,
        node.output,
        fixed=made.fixed,
        lengths=((query, -2), (key, -2)),
        otherwise=plain,
    )
