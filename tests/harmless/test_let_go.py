"""What gradscope was given dies with its last name of the user's, as it would alone: Python's collector may be off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope


class Norm(nn.Module):
    """An RMS norm that is left alone: its mean square is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(16)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        self.seen = float(square.detach().sum())
        return self.weight * (x * torch.rsqrt(square + 1e-6))


class Net(nn.Module):
    def __init__(self, ends_at: int = 0, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(16, 16), Norm(), nn.Linear(16, 1)
        self.ends_at, self.error, self.calls = ends_at, error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.ends_at:
            raise self.error("planted")
        out: Tensor = self.out(self.norm(self.into(x)))
        return out


class Held:
    """Something large of the user's that gradscope is not told of: a name of the function that calls it."""


def _profile(model: nn.Module, batch: Tensor) -> Any:
    return gradscope.profile(model, batch, steps=2, warmup=1)


def _profiling(model: nn.Module, batch: Tensor) -> Any:
    with gradscope.profiling(model, steps=2, warmup=1) as loop:
        for _ in range(40):
            model(batch).sum().backward()
            if loop.step():
                break
    return loop.report


@pytest.fixture
def no_collector() -> Iterator[None]:
    _profile(Net(), torch.ones(4, 16))  # what is loaded at the first call may lie in cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _alive_after(
    run: Callable[[nn.Module, Tensor], Any], ends_at: int = 0, error: type[BaseException] = ValueError
) -> list[str]:
    """Names of what outlives the function that calls ``run`` on a model, while its result is kept."""
    gone: dict[str, weakref.ref[Any]] = {}

    def user() -> Any:
        model, batch, held = Net(ends_at, error), torch.ones(4, 16), Held()
        gone.update({"model": weakref.ref(model), "parameter": weakref.ref(model.norm.weight)})
        gone.update({"batch": weakref.ref(batch), "a name of the caller's": weakref.ref(held)})
        try:
            return run(model, batch)
        except (ValueError, KeyboardInterrupt):
            return None

    kept = user()
    alive = [name for name, each in gone.items() if each() is not None]
    del kept
    return alive


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("run", [_profile, _profiling])
def test_all_is_let_go_after_a_report(run: Callable[[nn.Module, Tensor], Any]) -> None:
    assert _alive_after(run) == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("ends_at", [1, 6])
def test_all_is_let_go_after_an_error(ends_at: int, error: type[BaseException]) -> None:
    assert _alive_after(_profile, ends_at, error) == []


@pytest.mark.usefixtures("no_collector")
def test_a_plan_keeps_neither_the_batch_nor_the_names_of_its_caller() -> None:
    alive = _alive_after(gradscope.plan)
    assert set(alive) <= {"model", "parameter"}, alive


@pytest.mark.usefixtures("no_collector")
def test_patches_keep_no_batch() -> None:
    alive = _alive_after(gradscope.patch)
    assert set(alive) <= {"model", "parameter"}, alive
