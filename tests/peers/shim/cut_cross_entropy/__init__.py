"""Offer the names that cut-cross-entropy's tests import, with ``recipes.linear_cross_entropy`` behind them."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor

from gradscope import recipes

IGNORE_INDEX = -100


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: int = 0,
    impl: str = "cce",
    return_lse: bool = False,
) -> Tensor:
    """The loss of embeddings [..., tokens, features]; with ``shift`` a token is to tell the one so far behind it."""
    assert not return_lse, "the recipe gives no logsumexp; its z_loss is a setting"
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    with torch.autocast(
        e.device.type, e.dtype, enabled=e.dtype != torch.float32
    ):  # their loss is float32, as autocast's
        return recipes.linear_cross_entropy(e, c, targets, bias, reduction=reduction, softcap=softcap)


def softcapping(logits: Tensor, softcap: float) -> Tensor:
    """Logits held within ``softcap`` of zero."""
    return softcap * torch.tanh(logits / softcap)


def _offer(name: str, **content: object) -> None:
    module = ModuleType(f"{__name__}.{name}")
    vars(module).update(content)
    sys.modules[module.__name__] = module


_offer("constants", IGNORE_INDEX=IGNORE_INDEX)
_offer("utils", softcapping=softcapping, compute_z_loss=None)  # the tests that call it are left out
