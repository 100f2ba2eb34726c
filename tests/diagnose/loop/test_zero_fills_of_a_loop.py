"""Gradients that a loop fills with zeros, by hand or with torch's own: the fills are found and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules.loop import zero_grad_fills
from gradscope.tables import Finding
from tests.diagnose.run_case import loop_case
from tests.diagnose.timing_cases import check_words

Clear = Callable[[nn.Module, torch.optim.Optimizer], None]


def _by_hand(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _data(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def _fill(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach().fill_(0.0)


def _together(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


def _none(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _ones(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(1.0)


def _another(_model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    torch.ones(10).zero_()


BAD: dict[str, Clear] = {
    "by hand": _by_hand,
    "data": _data,
    "fill": _fill,
    "together": _together,
    "model": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}
GOOD: dict[str, Clear] = {
    "none": _none,
    "ones": _ones,
    "model": lambda model, _: model.zero_grad(),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "never": lambda model, optimizer: None,
    "another": _another,
}


def _case(clear: Clear, *, at_end: bool = False) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x = torch.randn(8, 64)

    def step() -> None:
        if not at_end:
            clear(model, optimizer)
        model(x).pow(2).mean().backward()
        optimizer.step()
        if at_end:
            clear(model, optimizer)

    return loop_case(step, model, memory=False)


def _on_gpu(case: Case) -> Finding:
    """What is found where the same ran on one."""
    run = replace(case.run, environment={**case.run.environment, "device": "cuda"})
    (found,) = zero_grad_fills.find(replace(case, run=run))
    return found


@pytest.mark.parametrize("at_end", [False, True], ids=["before forward", "after the optimizer"])
@pytest.mark.parametrize("clear", BAD.values(), ids=BAD)
def test_fills_are_found_and_timed(clear: Clear, at_end: bool) -> None:
    case = _case(clear, at_end=at_end)
    (found,) = zero_grad_fills.find(case)
    check_words(found)
    assert found.line is not None and "test_zero_fills_of_a_loop.py" in found.line
    assert "4 gradients" in found.evidence
    assert "are zero-filled in" in found.evidence
    assert (found.predicted_saving_ns, found.predicted_low_ns) == (None, None)  # on a CPU it may even be lost
    assert found.predicted_high_ns
    assert _on_gpu(case).predicted_low_ns


@pytest.mark.parametrize("clear", GOOD.values(), ids=GOOD)
def test_what_is_no_fill_of_a_gradient(clear: Clear) -> None:
    assert list(zero_grad_fills.find(_case(clear))) == []


def test_only_the_gradients_part_of_the_fills_counts() -> None:
    held = torch.empty(1_000_000)

    def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _by_hand(model, optimizer)
        held.zero_()

    case = _case(clear)
    fills = sum(row.self_ns for row in case.run.ops if row.layer is None and row.name in ("aten::zero_", "aten::fill_"))
    filled_ns = _on_gpu(case).predicted_low_ns
    assert filled_ns is not None
    assert 0 < filled_ns < fills / 50


def test_what_runs_between_the_phases_has_rows() -> None:
    case = _case(_by_hand)
    rows = [row for row in case.run.ops if row.phase == "other"]
    assert {row.name for row in rows} >= {"aten::zero_"}
    assert all(row.layer is None and row.shape is None and row.name != "(python)" for row in rows)
    assert 0 < sum(row.self_ns for row in rows) <= case.run.step.other_ns
