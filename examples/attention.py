"""Multi-head attention twice: with the head permutes copied, and as views.

    gradscope profile examples/attention.py                 copies q, k, v and the output
    gradscope profile examples/attention.py:non_copying     the same numbers from views

What to look for: the lines with ``.contiguous()`` in ``CopyingAttention.forward``. Each costs a copy in forward, a copy
of the gradient in backward, and holds memory that the view does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS, BATCH = 256, 8, 256, 4


class Attention(nn.Module):
    """What both variants share: projections, mask and sizes."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, tokens: int = TOKENS) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1))


class CopyingAttention(Attention):
    """Slices and permutes that make new tensors, as a library without strided views has to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.c_attn(x)
        size = width // self.heads
        q = qkv[..., :width].reshape(batch, tokens, self.heads, size).permute(0, 2, 1, 3).contiguous()
        k = qkv[..., width : 2 * width].reshape(batch, tokens, self.heads, size).permute(0, 2, 3, 1).contiguous()
        v = qkv[..., 2 * width :].reshape(batch, tokens, self.heads, size).permute(0, 2, 1, 3).contiguous()
        scores = (q @ k) * size**-0.5 + self.mask[:tokens, :tokens]
        out = F.softmax(scores, dim=-1) @ v
        out = out.permute(0, 2, 1, 3).contiguous().reshape(batch, tokens, width)
        return self.c_proj(out)


class ViewingAttention(Attention):
    """The same sums from views: only the merge of the heads copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        size = width // self.heads
        q = q.view(batch, tokens, self.heads, size).transpose(1, 2)
        k = k.view(batch, tokens, self.heads, size).transpose(1, 2)
        v = v.view(batch, tokens, self.heads, size).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * size**-0.5 + self.mask[:tokens, :tokens]
        out = F.softmax(scores, dim=-1) @ v
        return self.c_proj(out.transpose(1, 2).reshape(batch, tokens, width))


def _make(kind: type[Attention]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind()), torch.randn(BATCH, TOKENS, WIDTH)


def copying() -> tuple[nn.Module, torch.Tensor]:
    """Two layers that copy their heads."""
    return _make(CopyingAttention)


def non_copying() -> tuple[nn.Module, torch.Tensor]:
    """Two layers that view their heads."""
    return _make(ViewingAttention)


workload = copying


def main() -> None:
    (first, x), (second, _) = copying(), non_copying()
    print(f"largest difference: {(first(x) - second(x)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
