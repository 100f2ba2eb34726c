"""Small models with attention by hand, for tests that change what is written for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Causal(nn.Module):
    """A causal buffer, dropout; the parts stand inside the heads, so that attention is found and not the packed one."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        att = self.drop(att.softmax(-1))
        y = att @ v
        return y.transpose(1, 2).reshape(batch, length, width)


class Unused(Causal):
    """Its attention goes nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        y = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        return q.squeeze(1) + 0 * y.squeeze(1)


class Twice(Causal):
    """Two attentions in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        one = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        two = ((v @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ q
        return (one + two).squeeze(1)
