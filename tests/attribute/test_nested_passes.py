"""Gradient sums of passes inside of a pass, and of layers in several threads, go to their layer. Counts, no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .counted_passes import MISFIT, STEPS, WALKING, X, calls, passes_of, sums_of


class Residual(nn.Module):
    """A value of ``make``'s has two users: ``use`` and the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.use = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.make(x)
        return torch.add(y, self.use(y))


class RunsAgain(torch.autograd.Function):
    """Runs a block without a graph, and once more in its backward, with a pass of its own."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return None, torch.autograd.grad(ctx.block(x), x, gradients)[0]


def in_a_hook(block: nn.Module, x: Tensor) -> Tensor:
    """As an equilibrium model: the hook takes the gradient back through the block."""
    inner = x.detach().requires_grad_()
    out = block(inner)
    y = x * 1
    y.register_hook(lambda gradient: torch.autograd.grad(out, inner, gradient)[0])
    return y


NESTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),  # type: ignore[no-any-return]
    "reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),  # type: ignore[no-any-return]
    "reentrant checkpoint in another": lambda block, x: checkpoint(  # type: ignore[no-any-return]
        lambda x: checkpoint(block, x, use_reentrant=True), x, use_reentrant=True
    ),
    "Function": lambda block, x: RunsAgain.apply(block, x),  # type: ignore[no-any-return]
    "hook": in_a_hook,
}


@pytest.mark.parametrize("name", NESTED)
def test_a_sum_in_whatever_pass_belongs_to_the_layer_whose_value_has_several_users(name: str) -> None:
    """Two blocks, of which the second pass knows nothing of the first, and a leaf that no layer holds."""
    model = nn.ModuleList([Residual(), Residual()])

    def step(_: int) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for block in model:
            x = NESTED[name](block, x)
        x.sum().backward()

    _, data = passes_of(step, model=model)
    assert sums_of(data) == {"0.make": STEPS, "1.make": STEPS}
    assert not [op for op in data.ops if op.phase == "backward" and op.name.startswith("aten::add") and op.layer]


def test_a_sum_for_the_input_of_a_nested_pass_stays_where_it_was_delivered() -> None:
    """No layer of that pass made the value."""

    class Adds(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.make(x), x)

    model = Adds()

    def step(_: int) -> None:
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum().backward()  # type: ignore[no-untyped-call]

    _, data = passes_of(step, model=model)
    assert sums_of(data) == {"make": STEPS}


def test_nested_passes_that_are_alike_are_walked_once() -> None:
    model = nn.ModuleList(Residual() for _ in range(3))

    def step(_: int) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()

    passes, _ = passes_of(step, model=model)
    assert len(passes.graphs) == 4 and len(passes.passes) == 4 * (STEPS + 1)


class InThreads(nn.Module):
    """One layer in two threads, which both begin to count at zero: their nodes have the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: results.append(self.shared(x)))
            thread.start()
            thread.join()
        return torch.add(*results)


def test_a_sum_of_a_layer_that_runs_in_several_threads() -> None:
    model = InThreads()
    _, data = passes_of(lambda _: model(X).sum().backward(), model=model)
    assert sums_of(data) == {"shared": 2 * STEPS}
    assert calls(data, "accumulate", "AccumulateGrad") == {"shared": 2 * STEPS}


class Branches(nn.Module):
    """Other layers in each of two threads, all of which read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branches = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, results = self.stem(x), list[Tensor]()
        for branch in self.branches:
            thread = threading.Thread(target=lambda branch=branch: results.append(branch(y)))
            thread.start()
            thread.join()
        return torch.add(*results)


def test_a_sum_behind_layers_that_numbers_do_not_tell_apart_stays_where_it_was_delivered() -> None:
    model = Branches()
    _, data = passes_of(lambda _: model(X).sum().backward(), model=model)
    found = sums_of(data)
    assert sum(found.values()) == STEPS and set(found) <= {"branches.0", "branches.1"}
    assert calls(data, "accumulate", "AccumulateGrad") == dict.fromkeys(("stem", "branches.0", "branches.1"), 2 * STEPS)


class Wired(nn.Module):
    """The value of one of two layers has a second user; the operations and calls are the same."""

    def __init__(self, twice: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.twice = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), twice

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return torch.add(self.c(b), a if self.twice == "a" else b)


def test_passes_that_hooks_begin_are_told_apart_by_those_in_front_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module is called between them, and the numbers that they begin with are alike."""
    monkeypatch.setattr(WALKING, 0.0)
    model = nn.ModuleList([Wired("a"), Wired("b")])

    def step(_: int) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for block in model:
            x = in_a_hook(block, x)
        x.sum().backward()

    _, data = passes_of(step, model=model)
    assert sums_of(data) == {"0.a": STEPS, "1.b": STEPS}
    assert not any(MISFIT in note for note in data.notes)
