"""Models of known cost that more than one test or benchmark runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .burning import Burn, Burning, Source


class Chain(nn.Module):
    """A stem, burning layers, and layers that do next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.cheap = Burning(1, 4)
        self.idle = nn.Identity()
        self.dear = Burning(3, 9)
        self.quiet = nn.Linear(8, 8)
        self.even = Burning(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.even(self.quiet(self.dear(self.idle(self.cheap(self.stem(x))))))
        return out


class Shared(nn.Module):
    """One module used twice in a call, and held under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.twice = Burning(1, 3)
        self.left = nn.Sequential(Burning(2, 1))
        self.right = nn.Sequential(self.left[0], Burning(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.stem(x)))
        out: Tensor = self.right(self.left(x))
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Source(1, 3)
        self.second = Burning(1, 2)

    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:
        out: Tensor = self.second(self.first(hidden * scale))
        return out


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, *, x: Tensor, scale: float) -> Tensor:
        out: Tensor = self.inner(hidden=x, scale=scale)
        return out


class Table(Burning):
    """Embedding-like: its input are integers, its weight needs a gradient."""

    def __init__(self) -> None:
        super().__init__(2, 5)
        self.weight = nn.Parameter(torch.ones(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = Burn.apply(self.spec(), self.weight)
        return out[ids]


class Flood(nn.Module):
    """In-place ReLU after layers whose output it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.a, self.relu_a = Burning(1, 3), nn.ReLU(inplace=True)
        self.b, self.relu_b = Burning(2, 2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu_a(self.a(self.stem(x)))
        out: Tensor = self.relu_b(self.b(x).mul_(2.0))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Residual(nn.Module):
    """source -> x + inner(x) -> x + inner(x): two values have two users each."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.first, self.second = Source(1, 1), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.source(x)))
        return out


class Checkpointed(nn.Module):
    """A stem, a checkpointed block, and a tail outside the checkpoint."""

    def __init__(self, reentrant: bool, block: nn.Module | None = None, early: bool = True) -> None:
        super().__init__()
        self.reentrant, self.early = reentrant, early
        self.stem = Source(1, 1)
        self.block = block or nn.Sequential(Burning(2, 3), nn.Linear(8, 8), Burning(3, 1))
        self.tail = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(self.early):
            x = checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)
        out: Tensor = self.tail(x)
        return out
