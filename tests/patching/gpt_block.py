"""A block of a small GPT with attention by hand, and its input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, LONGEST = 16, 2, 10, 16


class Attention(nn.Module):
    """As in nanoGPT: a causal buffer, longer than the sequence, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (each.view(b, t, HEADS, c // HEADS).transpose(1, 2) for each in self.c_attn(x).split(c, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inp, self.attn, self.out = nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)
        self.broken = False

    def forward(self, x):
        x = self.inp(x)
        x = x + self.attn(x)
        if self.broken:
            raise RuntimeError("broken")
        return self.out(x)


def x(length: int = LENGTH, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(batch, length, WIDTH, dtype=dtype)
