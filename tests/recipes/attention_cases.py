"""What the tests of attention share: one run with all gradients, and torch's own samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.attention import reference
from gradscope.kernels.attention.options import AttentionOptions, default_scale
from gradscope.recipes.attention import attention

from .accuracy import assert_as_accurate

NAMES = ("out", "dq", "dk", "dv", "dbias")


def run(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result of fresh leaves, and their gradients for an upstream gradient that differs by element."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out = function(*leaves)
    upstream = torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def by_reference(*tensors: Tensor, keep: Tensor | None = None, mask: Tensor | None = None, **settings: Any) -> Tensor:
    """The same by plain operations; a fourth tensor is an added bias."""
    q, k, v, *bias = tensors
    settings.setdefault("scale", default_scale(q.shape[3]))
    options = AttentionOptions(kv_heads=k.shape[1], **settings)
    return reference.attention(q, k, v, bias[0] if bias else mask, options, keep)[0]


def ours(*tensors: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    """The CPU path; a fourth tensor is an added bias."""
    q, k, v, *bias = tensors
    grouped = q.shape[1] != k.shape[1]
    return attention(q, k, v, bias[0] if bias else mask, enable_gqa=grouped, backend="cpu", **settings)


def assert_all_as_accurate(
    mine: tuple[Tensor, ...],
    torchs: tuple[Tensor, ...],
    truth: tuple[Tensor, ...],
    tensors: tuple[Tensor, ...],
    by_scores: float = 0.0,
) -> None:
    """The result and every gradient are as accurate as torch's.

    Args:
        by_scores: how far the result moves for a relative change of the scores; see ``moved_by_scores``.

    In ds = p * (dp - delta) the difference nearly cancels (with one key it does, and torch's softmax is exact there):
    what is left is the rounding of dp and delta in float32, times the other side of the product.
    """
    q, k, v = (x.detach().double() for x in tensors[:3])
    upstream = torch.ones(mine[0].shape, dtype=torch.float64) * 2
    dp = upstream @ v.abs().repeat_interleave(q.shape[-3] // v.shape[-3], -3).transpose(-2, -1)
    cancelled = (dp.max() * max(q.abs().max(), k.abs().max()) / q.shape[-1] ** 0.5).item()
    for name, one, other, true in zip(NAMES, mine, torchs, truth, strict=False):
        assert_as_accurate(one, other, true, name, inner=by_scores if name == "out" else cancelled)


def moved_by_scores(tensors: tuple[Tensor, ...], mask: Tensor | None, is_causal: bool) -> float:
    """How far an element of the result moves, at most, for a change of every score by its own size.

    A score s is a sum with the rounding of its terms' absolute values S, and moves the result o by p (v - o) for each
    unit: sum_j p_j S_j |v_j - o|, which is large where two keys with high scores share a query.
    """
    q, k, v = (x.detach().double() for x in tensors[:3])
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).nan_to_num()  # of a row without keys
    moved = weights * (q.abs() @ k.abs().mT * q.shape[-1] ** -0.5)
    apart = (v.unsqueeze(-3) - (weights @ v).unsqueeze(-2)).abs()
    return (moved.unsqueeze(-1) * apart).sum(-2).max().item()


def qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    size: int,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query from a projection's layout, key and value in others."""
    q = torch.randn(batch, queries, heads, size, dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, keys, size, dtype=dtype)
    v = torch.randn(keys, batch, kv_heads, value_size or size, dtype=dtype).permute(1, 2, 0, 3)
    return q, k, v
