"""Further patterns whose numbers stand in attributes: made into tensors, a form, two alike, a table's place."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.patching.numbers_models import LENGTH, WIDTH, Attention, Numbers


class PickedFromAList(Numbers):
    """What is made into a tensor is several numbers."""

    changes: ClassVar = {"numbers": [1.0, 4.0]}

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.weight = [1.0, 2.0], nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return x * torch.rsqrt(x.pow(torch.tensor(self.numbers)[1]).mean(-1, keepdim=True) + 1e-5) * self.weight


class NormOfASum(Numbers):
    """What is normalised has no weight, which would fit the last dimension alone."""

    changes: ClassVar = {"form": (LENGTH, WIDTH)}

    def __init__(self) -> None:
        super().__init__()
        self.form = (WIDTH,)

    def forward(self, x: Tensor) -> Tensor:
        dropped = functional.dropout(self.lift(x), 0.0)
        return functional.layer_norm(x + dropped, self.form)


class Capped(Attention):
    """Two numbers that are one and the same today, and the new code has one."""

    changes: ClassVar = {"cap": 3.0, "depth": 3.0}

    def __init__(self) -> None:
        super().__init__()
        self.cap, self.depth = 5.0, 5.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = torch.tanh(q @ k.transpose(-2, -1) / self.cap) * self.depth
        return (scores.softmax(-1) @ v).squeeze(1)


class Turned(Numbers):
    """A table's tokens are those of the heads' dimension, then of the other."""

    changes: ClassVar = {"first": 1, "second": 1}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = 0, 0
        angles = torch.rand(LENGTH, WIDTH // 2).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).unsqueeze(1)
        cos = self.cos.unsqueeze(self.first).unsqueeze(self.second)
        sin = self.sin.unsqueeze(self.first).unsqueeze(self.second)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin


MORE: tuple[type[Numbers], ...] = (PickedFromAList, NormOfASum, Capped, Turned)
