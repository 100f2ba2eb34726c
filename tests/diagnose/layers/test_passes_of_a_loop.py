"""Steps that go backward through a layer more than once: that is no slow backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case
from tests.diagnose.run_case import DEAR_PRODUCTS, in_case, loop_case, timed_by_operations

RULE = "backward-ratio"
_STEPS = 4  # an operation that is not known to be slow must be so in that many
_EACH_NS = 100_000


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def _residual(model: nn.Module) -> None:
    """Of a differential equation of the second order."""
    x = torch.rand(64, 2, requires_grad=True)
    y = model(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (second + y).pow(2).mean().backward()


def _penalty(model: nn.Module) -> None:
    """Of a critic's gradient."""
    x = torch.rand(64, 2, requires_grad=True)
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()


def _several_losses(model: nn.Module) -> None:
    y = model(torch.rand(64, 2))
    losses = [(y - goal).pow(2).mean() for goal in range(8)]
    for loss in losses:
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    sum(losses, torch.zeros(())).backward()


@cache
def _case(step: Callable[[nn.Module], None]) -> Case:
    torch.manual_seed(0)
    model = _net()
    case = loop_case(lambda: step(model), model, steps=_STEPS, memory=False)
    return timed_by_operations(case, _EACH_NS, DEAR_PRODUCTS)


@pytest.mark.parametrize("step", [_residual, _penalty, _several_losses])
def test_passes_through_one_graph_are_no_slow_backward(step: Callable[[nn.Module], None]) -> None:
    assert not in_case(_case(step), RULE)


@pytest.mark.parametrize("step", [_residual, _penalty])
def test_a_graph_of_gradients_is_seen_without_a_recorded_step(step: Callable[[nn.Module], None]) -> None:
    case = _case(step)
    assert not in_case(Case(case.run, replace(case.facts, calls=())), RULE)


@pytest.mark.parametrize("rounds", [5, 40])
def test_a_graph_that_is_kept_for_nothing_hides_no_slow_backward(rounds: int) -> None:
    class SlowTanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            y = x.tanh()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
            for _ in range(rounds):
                (1 - y * y).sort()
            return grads[0] * (1 - y * y)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SlowTanh.apply(x)  # type: ignore[no-any-return]

    def step() -> None:
        model(torch.rand(64, 2)).sum().backward(retain_graph=True)

    model = nn.Sequential(nn.Linear(2, 32), Slow())
    case = timed_by_operations(loop_case(step, model, steps=_STEPS, memory=False), _EACH_NS)
    assert in_case(case, RULE)
