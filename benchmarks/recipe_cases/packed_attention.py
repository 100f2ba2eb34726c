"""A packed projection through attention, at nanoGPT's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.packed_attention import packed_attention

from .case import Case, Step

HEADS, SIZE = 12, 64
WIDTH = HEADS * SIZE


def _sdpa_with_split(qkv: Tensor, dropout_p: float) -> Tensor:
    """As nanoGPT has it."""
    batch, tokens, _ = qkv.shape
    q, k, v = (x.view(batch, tokens, HEADS, SIZE).transpose(1, 2) for x in qkv.split(WIDTH, dim=2))
    y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return y.transpose(1, 2).contiguous().view(batch, tokens, WIDTH)


def _make(batch: int, tokens: int, dropout_p: float) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        qkv, upstream = torch.randn(batch, tokens, 3 * WIDTH, requires_grad=True), torch.randn(batch, tokens, WIDTH)

        def baseline() -> None:
            torch.autograd.grad(_sdpa_with_split(qkv, dropout_p), qkv, upstream)

        def recipe() -> None:
            torch.autograd.grad(packed_attention(qkv, HEADS, None, dropout_p, is_causal=True), qkv, upstream)

        return baseline, recipe

    return make


CASES = [
    Case("packed_attention", "B2 H12 T1024 d64 causal", "SDPA with split", _make(2, 1024, 0.0), faster=1.1),
    Case("packed_attention", "B8 H12 T1024 d64 causal", "SDPA with split", _make(8, 1024, 0.0), faster=1.1),
    Case("packed_attention", "B8 H12 T512 d64 causal", "SDPA with split", _make(8, 512, 0.0)),
    Case("packed_attention", "B8 H12 T256 d64 causal", "SDPA with split", _make(8, 256, 0.0)),
    Case("packed_attention", "B1 H12 T4096 d64 causal", "SDPA with split", _make(1, 4096, 0.0)),
    Case(
        "packed_attention", "B2 H12 T1024 d64 causal, dropout 0.1", "SDPA with split", _make(2, 1024, 0.1), faster=2.0
    ),
]
