"""Models for the rules about time: each with one planted problem, and the same without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.diagnose.run_case import Twin


class SlowTanh(torch.autograd.Function):
    """Its backward loops in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        rows = zip(gradient.flatten(0, 1), y.flatten(0, 1), strict=True)
        return torch.stack([one * (1 - row * row) for one, row in rows]).view_as(y)


class Activated(nn.Module):
    """A linear layer and an activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Block(nn.Module):
    """One of several; ``repeats`` does the same product again and again."""

    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 96)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        y = sum(functional.linear(x, self.linear.weight, self.linear.bias) for _ in range(self.repeats))
        assert isinstance(y, Tensor)
        return x + torch.relu(y)


class Stack(nn.Module):
    """Blocks, of which the third may be another."""

    def __init__(self, third: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() if n != 3 or third is None else third for n in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Heads(nn.Module):
    """Small attention, head by head or all heads at once."""

    def __init__(self, *, loop: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 32, 2).transpose(1, 2) for part in self.qkv(x).split(64, -1))
        if self.loop:
            return torch.stack([torch.tanh(q[:, h] @ k[:, h].transpose(1, 2)) @ v[:, h] for h in range(32)], 1)
        return torch.tanh(q @ k.transpose(-1, -2)) @ v


class Head(nn.Module):
    """One head of attention, with layers of its own."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.query(x) @ self.key(x).transpose(1, 2)) @ self.value(x)


class HeadList(nn.Module):
    """Heads side by side, each a module."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(32, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class Recurrent(nn.Module):
    """A plain recurrent network by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = torch.relu(self.outer(x[:, t]) + self.inner(h))
        return h


class Last(nn.Module):
    """The last state of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(16, 16, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


class Two(nn.Module):
    """A head that is used and one that may not be."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.body, self.head, self.old = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 2048)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.body(x))
        return self.head(x).sum(-1) + self.old(x).sum(-1) if self.both else self.head(x).sum(-1)


class Reading(nn.Module):
    """Reads numbers of its result, one by one or together."""

    def __init__(self, *, one_by_one: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 512)
        self.one_by_one = one_by_one
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        means = y.detach().mean(0)
        if self.one_by_one:
            self.seen = [means[n].item() for n in range(512)]
        else:
            self.seen = means.tolist()
        return y


def _with(make: Callable[[], nn.Module], *shape: int, **more: Any) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"model": make(), "batch": torch.randn(*shape), "memory": False, **more}

    return made


def _trained(*names: str) -> Callable[[], dict[str, Any]]:
    """Two heads, with an optimizer for these."""

    def made() -> dict[str, Any]:
        model = Two(both=True)
        held = [each for name in names for each in model.get_submodule(name).parameters()]
        optimizer = torch.optim.SGD(held, lr=0.1)
        return {"model": model, "batch": torch.randn(512, 64), "optimizer": optimizer, "memory": False}

    return made


def _hooked() -> nn.Module:
    """A hook that was left on one block."""
    model = Stack()

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].detach().sort()

    model.blocks[2].register_forward_pre_hook(look)
    return model


TWINS: list[Twin] = [
    Twin(
        "backward by hand",
        "backward-ratio",
        _with(lambda: Activated(SlowTanh.apply), 16, 128, 64),
        _with(lambda: Activated(torch.tanh), 16, 128, 64),
    ),
    Twin("one block does more", "slow-repeat", _with(lambda: Stack(Block(6)), 512, 96), _with(Stack, 512, 96)),
    Twin("a hook left on one block", "slow-repeat", _with(_hooked, 512, 96), _with(Stack, 512, 96)),
    Twin(
        "heads one by one",
        "tiny-layers",
        _with(lambda: Heads(loop=True), 2, 16, 64),
        _with(lambda: Heads(loop=False), 2, 16, 64),
    ),
    Twin(
        "a list of heads",
        "tiny-layers",
        _with(lambda: HeadList(16, 2), 2, 16, 32),
        _with(lambda: HeadList(2, 16), 2, 16, 32),
    ),
    Twin("recurrence by hand", "tiny-layers", _with(Recurrent, 4, 24, 16), _with(Last, 4, 24, 16)),
    Twin(
        "odd vocabulary",
        "vocabulary-multiple",
        _with(lambda: nn.Linear(64, 10_003), 512, 64),
        _with(lambda: nn.Linear(64, 10_048), 512, 64),
    ),
    Twin(
        "head that is never used",
        "unused-gradients",
        _with(lambda: Two(both=False), 64, 64),
        _with(lambda: Two(both=True), 64, 64),
    ),
    Twin("head that is not trained", "unused-gradients", _trained("body", "head"), _trained("body", "head", "old")),
    Twin(
        "numbers read one by one",
        "host-sync",
        _with(lambda: Reading(one_by_one=True), 16, 32),
        _with(lambda: Reading(one_by_one=False), 16, 32),
    ),
]
