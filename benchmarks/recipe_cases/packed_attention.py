"""A packed projection through attention, at nanoGPT's shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.packed_attention import packed_attention

from .case import RecipeCase, Step

HEADS, SIZE = 12, 64


def _sdpa_with_split(qkv: Tensor, heads: int, dropout_p: float) -> Tensor:
    """Split and attend as nanoGPT does."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return y.transpose(1, 2).contiguous().flatten(2)


def _by_hand(qkv: Tensor, heads: int, dropout_p: float) -> Tensor:
    """Write the scores out as makemore does."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    later = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(later, -torch.inf)
    y = functional.dropout(scores.softmax(3), dropout_p) @ v
    return y.transpose(1, 2).contiguous().flatten(2)


def _make(
    batch: int,
    tokens: int,
    dropout_p: float,
    heads: int = HEADS,
    size: int = SIZE,
    written: Callable[[Tensor, int, float], Tensor] = _sdpa_with_split,
) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        width = heads * size
        qkv, upstream = torch.randn(batch, tokens, 3 * width, requires_grad=True), torch.randn(batch, tokens, width)

        def baseline() -> None:
            torch.autograd.grad(written(qkv, heads, dropout_p), qkv, upstream)

        def recipe() -> None:
            torch.autograd.grad(packed_attention(qkv, heads, None, dropout_p, is_causal=True), qkv, upstream)

        return baseline, recipe

    return make


# Where ours is no faster, torch's own is taken: what is left is the check in front of it, and noise.
AS_FAST = 0.95

CASES = [
    RecipeCase("packed_attention", "B2 H12 T1024 d64 causal", "SDPA with split", _make(2, 1024, 0.0), faster=AS_FAST),
    RecipeCase("packed_attention", "B8 H12 T1024 d64 causal", "SDPA with split", _make(8, 1024, 0.0), faster=AS_FAST),
    RecipeCase("packed_attention", "B8 H12 T512 d64 causal", "SDPA with split", _make(8, 512, 0.0)),
    RecipeCase("packed_attention", "B8 H12 T256 d64 causal", "SDPA with split", _make(8, 256, 0.0)),
    RecipeCase("packed_attention", "B1 H12 T4096 d64 causal", "SDPA with split", _make(1, 4096, 0.0)),
    RecipeCase(
        "packed_attention", "B2 H12 T1024 d64 causal, dropout 0.1", "SDPA with split", _make(2, 1024, 0.1), faster=2.0
    ),
    RecipeCase("packed_attention", "B64 H4 T13 d16 causal", "SDPA with split", _make(64, 13, 0.0, 4, 16)),
    RecipeCase("packed_attention", "B64 H4 T13 d16 causal", "by hand", _make(64, 13, 0.0, 4, 16, _by_hand)),
]
