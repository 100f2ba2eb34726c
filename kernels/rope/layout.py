"""Which two features of a head make a pair, where results lie, and the rotation written out, for tests.

With the angle θ of a position and a pair (a, b):

    a' = a cos θ - b sin θ        b' = b cos θ + a sin θ

Its inverse, and so its backward, is the same with -sin θ. Halves (GPT-NeoX, Llama): feature i and i + n/2 of the first
n. Interleaved (GPT-J, the paper): features 2i and 2i + 1. Source: J. Su et al., RoFormer (arXiv:2104.09864), section
3.4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pairs_of(x: Tensor, rotary: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Both features of each pair, views [..., rotary / 2] of the first ``rotary`` features of ``x``."""
    if interleaved:
        return x[..., 0:rotary:2], x[..., 1:rotary:2]
    return x[..., : rotary // 2], x[..., rotary // 2 : rotary]


def empty_as(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized; dense, with heads next to each other in memory, or tokens, as ``x`` has them."""
    batch, heads, tokens, size = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty((batch, tokens, heads, size), dtype=dtype or x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotated ``x`` [batch, heads, tokens, size]; cos and sin [batch or 1, 1, tokens, pairs]."""
    rotary = 2 * cos.shape[-1]
    a, b = pairs_of(x, rotary, interleaved)
    turned = (a * cos - b * sin, b * cos + a * sin)
    first = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((first.to(x.dtype), x[..., rotary:]), -1)
