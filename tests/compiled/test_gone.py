"""A compiled model of a function that returns before the run has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradscope

# Loading Dynamo warns of its own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def test_a_compiled_model_that_is_gone_before_its_memory_is_measured() -> None:
    """A part of what torch.compile put around it, and that a part of it, as far as is known then."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        run = torch.compile(model, backend="eager")
        for _ in range(8):
            run(torch.randn(4, 8)).square().mean().backward()
            prof.step()

    with gradscope.profiling(steps=2, warmup=1) as prof:
        train()
    assert {row.path for row in prof.report.data.layers} >= {"0", "1", "2"}


class Parts(nn.Module):
    """Two layers of one size, on 7 and on 3 rows; the first one's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(11, 11), nn.Linear(11, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return y.sum() + torch.tanh(self.b(y[:3].sin())).square().sum()


FLOPS = {"a": (2 * 7 * 11**2, 2 * 7 * 11**2), "b": (2 * 3 * 11**2, 4 * 3 * 11**2)}


def measured(step: Callable[[int], None], model: nn.Module | None = None) -> dict[str, Any]:
    with gradscope.profiling(*[model] * (model is not None), steps=1, warmup=3, memory=False) as prof:
        for number in range(40):
            if prof.step():
                break
            step(number)
    rows = prof.report.data.layers
    return {row.path[-1]: (row.forward_flops, row.backward_flops) for row in rows if row.path[-1:] in FLOPS}


def test_layers_that_are_made_anew_have_what_they_did_whatever_their_ids(inductor: None) -> None:
    """Both are deleted before they are made again, so that one may have the id that the other had."""
    model = Parts()
    run, x = torch.compile(model), torch.randn(7, 11)

    def step(number: int) -> None:
        if number == 1:
            del model.a, model.b
            model.b, model.a = nn.Linear(11, 11), nn.Linear(11, 11)
        run(x).backward()
        model.zero_grad()

    assert measured(step, model) == FLOPS


def test_a_graph_of_a_model_that_is_gone_is_that_of_the_one_that_trains(inductor: None) -> None:
    """One compiled function for the model of each trial."""
    run, x = torch.compile(lambda model, x: model(x) * 2.0), torch.randn(7, 11)
    models: list[nn.Module] = []

    def step(number: int) -> None:
        if number in {0, 2}:
            models.clear()
            models.append(Parts())
        run(models[0], x).backward()
        models[0].zero_grad()

    assert measured(step) == FLOPS
