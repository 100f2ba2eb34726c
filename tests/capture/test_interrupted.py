"""Which steps the system interrupted, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.interrupted import StepCost, interrupted
from gradscope.capture.phases import timed
from gradscope.tables import Spread, StepTimes, is_unreliable

MS = 1_000_000


def costs(*pairs: tuple[float, float]) -> list[StepCost]:
    """Steps of (wall, processor time) in ms."""
    return [StepCost(round(wall * MS), round(processor * MS)) for wall, processor in pairs]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (costs((10, 10), (10, 10), (10, 10), (10, 10)), []),
        (costs((10, 10), (30, 10.5), (10, 10), (11, 11)), [1]),  # it waited for a core
        (costs((10, 10), (30, 30), (10, 10), (11, 11)), []),  # it had three times as much to do
        (costs((10, 20), (30, 60), (10, 20), (11, 22)), []),  # so with two threads
        (costs((10, 20), (30, 40), (10, 20), (11, 22)), [1]),  # one thread was stopped, the other span
        (costs((10, 10), (30, 10), (40, 10), (10, 10), (10, 10)), [1, 2]),
        (costs((0.1, 0.1), (0.25, 0.1), (0.1, 0.1)), []),  # a wake-up of the scheduler
        (costs((10, 10), (12, 10), (10, 10)), []),  # within what steps differ by
        (costs((10, 10), (99, 10)), []),  # of two nobody knows which is the odd one
        (costs((10, 2), (30, 2.1), (10, 2)), [1]),  # a loop that waits anyway, for its data
    ],
)
def test_a_step_that_took_longer_without_working_longer(steps: list[StepCost], found: list[int]) -> None:
    assert interrupted(steps) == found


def _run(monkeypatch: pytest.MonkeyPatch, odd: set[int], steps: int = 4) -> Any:
    """A run in which the measured steps with these numbers were interrupted."""
    monkeypatch.setattr(timed, "interrupted", lambda costs: [number for number in range(len(costs)) if number in odd])
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return gradscope.profile(model, torch.ones(4, 8), steps=steps, warmup=1).data


@pytest.mark.unsteady
@pytest.mark.parametrize(
    ("odd", "kept", "left_out"),
    [
        (set(), 4, 0),
        ({1}, 4, 1),
        ({0, 2}, 4, 2),
        ({1, 4}, 4, 2),  # one of those that were taken in its place, too
        (set(range(8)), 0, 8),
        ({0, 1, 2, 4, 5}, 3, 5),  # no more than as many again
    ],
)
def test_interrupted_steps_are_left_out_and_measured_again(
    odd: set[int], kept: int, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        odd = odd - {3}  # one must be left
        kept, left_out = 1, 7
    run = _run(monkeypatch, odd)
    assert (run.workload.steps, run.workload.steps_left_out) == (kept, left_out)
    assert all(row.calls == 1 for row in run.layers)  # of each step that is kept: means go over those alone
    assert run.partial is (kept < 4)


@pytest.mark.unsteady
def test_the_header_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.report.header import header_rows

    text = dict(header_rows(_run(monkeypatch, {1})))["measured"]
    assert text.startswith("4 of 5 steps after 1 warm-up · 1 left out, interrupted by the system · ")


@pytest.mark.unsteady
@pytest.mark.parametrize(("std_ns", "unreliable"), [(24, False), (26, True)])
def test_steps_that_differ_too_much_support_no_alarm(std_ns: int, unreliable: bool) -> None:
    step = StepTimes(100, 40, 40, 20, 0, {"wall": Spread(60, 100, 140, std_ns)}, None, None)
    assert is_unreliable(step) is unreliable
