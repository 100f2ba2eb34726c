"""A model that calls modules of torch's and of its own; what changes them later stands in another file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 16, 30


class OwnSilu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class OwnGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Called(nn.Module):
    """Modules of torch's whose calls go: an embedding, dropout, a norm, an activation, a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop, self.soft = nn.Dropout(0.0), nn.Softmax(dim=-1)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.SiLU())
        self.other, self.wide, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), OwnSilu()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + (self.drop(self.soft(q @ k.mT * 0.25)) @ v).squeeze(1)
        x = self.norm(x)
        x = x + self.act(self.gate(x)) * self.up(x)
        x = x + self.own(self.other(x)) * self.wide(x)
        return self.criterion(self.head(x).flatten(0, 1), words.flatten())
