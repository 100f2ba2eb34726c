"""Multi-head attention twice: with the head permutes copied, and as views.

    gradscope profile examples/attention.py                 copies q, k, v and the output
    gradscope profile examples/attention.py:non_copying     the same numbers from views

What to look for: unfused attention in both: all scores are stored for backward, and mask and softmax read them. Where
copies are, also the lines that cut ``qkv`` into q, k and v. Backward of each of the three slices fills a whole qkv of
zeros and adds it to the others (``aten::slice_backward``, and a gradient sum in ``c_attn``), where ``split`` puts its
three gradients together once. The ``.contiguous()`` that one would suspect are not it: ``@`` copies heads that are
views into the same layout by itself, so both variants allocate and save the same bytes in forward.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """The same sums from views, with no copy in the source but where the heads are merged."""

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


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The distance to the input, so that every number has a gradient of its own."""
    return F.mse_loss(output, batch)


def _make(kind: type[Attention]) -> tuple[nn.Module, torch.Tensor, Loss]:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind()), torch.randn(BATCH, TOKENS, WIDTH), loss


def copying() -> tuple[nn.Module, torch.Tensor, Loss]:
    """Two layers that copy their heads."""
    return _make(CopyingAttention)


def non_copying() -> tuple[nn.Module, torch.Tensor, Loss]:
    """Two layers that view their heads."""
    return _make(ViewingAttention)


workload = copying


def main() -> None:
    (first, x, _), (second, _, _) = copying(), non_copying()
    print(f"largest difference: {(first(x) - second(x)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
