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


class GeluBetweenMadeLayers(nn.Module):
    """Gelu by hand behind a layer that each call makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(nn.LayerNorm(8)(x))
        return torch.as_tensor(self.down(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))))


class StoresItsLoss(nn.Module):
    """The loss stays in an attribute, and with it its graph; ``also`` stores what gelu makes on the way."""

    def __init__(self, *, loss: bool, also: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.loss, self.also = loss, also
        self.stored: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.stored.clear()
        h = self.up(x)
        erf = torch.erf(h / math.sqrt(2.0))
        if self.also:
            self.stored.append(erf)
        loss = self.down(h * 0.5 * (1.0 + erf)).square().mean()
        if self.loss:
            self.stored.append(loss)
        return torch.as_tensor(loss)
