"""Debugging switches that a loop turns on for a part of its step only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules.settings import anomaly_mode
from tests.diagnose.run_case import loop_case
from tests.diagnose.timing_cases import check_words

Around = Callable[[], AbstractContextManager[Any]]


@contextmanager
def _switched() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(False)


def _case(forward: Around = nullcontext, backward: Around = nullcontext) -> Case:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def step() -> None:
        with forward():
            loss = model(torch.ones(4, 16)).mean()
        with backward():
            loss.backward()

    return loop_case(step, model, memory=False)


def _unchecked() -> AbstractContextManager[Any]:
    return torch.autograd.detect_anomaly(check_nan=False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("around", [_unchecked, _switched, torch.autograd.detect_anomaly])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_anomaly_mode_of_a_part_of_the_step(around: Around, phase: str) -> None:
    case = _case(**{phase: around})
    (found,) = anomaly_mode.find(case)
    check_words(found)
    assert "inside the step" in found.evidence
    assert found.line is not None and "test_switches_of_a_loop.py" in found.line
    assert found.predicted_saving_ns
    assert not torch.is_anomaly_enabled()


def test_no_switch_is_on() -> None:
    case = _case()
    assert list(anomaly_mode.find(case)) == []
    assert "inside_step" not in case.facts.settings


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_of_backward_only() -> None:
    case = _case(backward=_deterministic)
    assert case.facts.settings["deterministic"] is True
    assert case.facts.settings["inside_step"] == ["deterministic"]
