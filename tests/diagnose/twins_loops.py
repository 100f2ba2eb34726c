"""Planted problems of a training loop: each with one, and the same without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.diagnose.run_case import Twin

WIDTH = 64


class Samples(Dataset[Tensor]):
    """Rows of numbers that take a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.ones(WIDTH)


class Training:
    """A loop; what it does beside training is given.

    Args:
        batches: of the loop, where it has a loader.
        before: called with the model before forward.
        after: called with the loss and the output after the optimizer.
    """

    def __init__(
        self,
        batches: Iterator[Tensor] | None = None,
        before: Callable[[nn.Module], object] | None = None,
        after: Callable[[Tensor, Tensor], object] | None = None,
        width: int = WIDTH,
        depth: int = 3,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, foreach=True)
        self.batches, self.before, self.after = batches, before, after
        self.x = torch.ones(64, width)

    def step(self) -> None:
        """One training step."""
        x = self.x if self.batches is None else next(self.batches)
        if self.before is None:
            self.optimizer.zero_grad()
        else:
            self.before(self.model)
        output = self.model(x)
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        if self.after is not None:
            self.after(loss, output)

    def given(self, **options: Any) -> dict[str, Any]:
        """The keyword arguments of findings_of."""
        return {"model": self.model, "step": self.step, **options}


def _loading(seconds: float) -> dict[str, Any]:
    batches = iter(DataLoader(Samples(seconds), batch_size=4))
    return Training(batches).given(memory=False, steps=3, warmup=3)


def _clearing(*, fills: bool) -> dict[str, Any]:
    def by_hand(model: nn.Module) -> None:
        for parameter in model.parameters():
            if not fills:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    return Training(before=by_hand, width=256).given(memory=False)


def _keeping(*, detached: bool) -> dict[str, Any]:
    losses: list[Tensor] = []
    return Training(after=lambda loss, _: losses.append(loss.detach() if detached else loss)).given()


TWINS = [
    Twin("a slow dataset without workers", "data-loading", lambda: _loading(0.005), lambda: _loading(0.0)),
    Twin("gradients zeroed by hand", "zero-grad-fills", lambda: _clearing(fills=True), lambda: _clearing(fills=False)),
    Twin("losses of a loop kept", "leak", lambda: _keeping(detached=False), lambda: _keeping(detached=True)),
]
