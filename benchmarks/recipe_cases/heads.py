"""Splitting and merging heads around attention that is written by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.recipes.heads import merge_heads, split_qkv

from .case import RecipeCase, Step


def _split_by_torch(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    batch, tokens, width = qkv.shape
    return tuple(part.view(batch, tokens, heads, -1).transpose(1, 2) for part in qkv.split(width // 3, dim=2))


def _merge_by_torch(x: Tensor) -> Tensor:
    batch, heads, tokens, size = x.shape
    return x.transpose(1, 2).contiguous().view(batch, tokens, heads * size)


def _layer(
    split: Callable[..., tuple[Tensor, ...]], merge: Callable[[Tensor], Tensor], qkv: Tensor, heads: int
) -> Step:
    """The layer but for its products: gradients arrive as they give them, [batch, heads, tokens, size]."""
    batch, tokens, width = qkv.shape
    shape = (batch, heads, tokens, width // 3 // heads)
    inner, upstream = torch.randn(shape, requires_grad=True), torch.randn(batch, tokens, width // 3)
    gradients = [torch.randn(shape) for _ in range(3)]

    def step() -> None:
        torch.autograd.grad([merge(inner), *split(qkv, heads)], (inner, qkv), [upstream, *gradients])

    return step


def _make(batch: int) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        qkv = torch.randn(batch, 1024, 3 * 768, requires_grad=True)
        return _layer(_split_by_torch, _merge_by_torch, qkv, 12), _layer(split_qkv, merge_heads, qkv, 12)

    return make


CASES = [
    RecipeCase(
        "heads", f"B{batch} T1024 H12 d64, without the products", "split, view, transpose, contiguous", _make(batch)
    )
    for batch in (2, 8)
]
