"""Which steps the system interrupted, and what becomes of them."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.phases import timed
from gradscope.capture.phases.base import Phase
from gradscope.capture.system import StepCost, compiling, interrupted
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
        (costs((10, 10), (3, 10), (10, 10), (10, 10)), []),  # one that took less was not
        (costs((10, 10), (10, 10), (10, 10), (60, 15), (70, 15)), [3, 4]),  # the usual step, not the mean
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
    from gradscope.report.header import head_rows

    text = dict(head_rows(_run(monkeypatch, {1}), full=True))["measured"]
    assert text.startswith("4 of 5 steps after 1 warm-up · 1 left out, interrupted by the system · ")


@pytest.mark.unsteady
@pytest.mark.parametrize(("std_ns", "unreliable"), [(24, False), (26, True)])
def test_steps_that_differ_too_much_support_no_alarm(std_ns: int, unreliable: bool) -> None:
    step = StepTimes(100, 40, 40, 20, 0, {"wall": Spread(60, 100, 140, std_ns)}, None, None)
    assert is_unreliable(step) is unreliable


def test_steps_that_had_a_core_are_what_the_others_are_judged_against() -> None:
    """On a machine that is busy all the time most steps wait, and the median is of those that did."""
    busy = [StepCost(30 * MS, 4 * MS, 26 * MS)] * 4
    calm = [StepCost(4 * MS, 4 * MS, 0)]
    assert interrupted(busy + calm * 2) == [0, 1, 2, 3]
    assert interrupted(busy + calm) == []  # one alone may be the odd one
    assert interrupted(busy) == []
    worked = [StepCost(30 * MS, 24 * MS, 26 * MS)] * 4  # with several threads, by as much more as they took longer
    assert interrupted(worked + calm * 2) == []


@pytest.mark.unsteady
@pytest.mark.parametrize(("waited_ns", "unreliable"), [(None, False), (9, False), (11, True)])
def test_steps_that_waited_for_a_core_support_no_alarm(waited_ns: int | None, unreliable: bool) -> None:
    step = StepTimes(100, 40, 40, 20, 0, {"wall": Spread(99, 100, 101, 1)}, None, None, waited_ns)
    assert is_unreliable(step) is unreliable


def _waiting(monkeypatch: pytest.MonkeyPatch, share: float) -> Any:
    """A run whose thread had no core for this share of its time, as the system tells."""
    monkeypatch.setattr(timed, "without_core_ns", lambda: round(share * time.perf_counter_ns()))
    monkeypatch.setattr(timed, "interrupted", lambda costs: [])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    return gradscope.profile(model, torch.ones(4, 64), optimizer=torch.optim.Adam(model.parameters()), warmup=1).data


@pytest.mark.unsteady
def test_a_run_that_waited_for_a_core_says_so_and_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.report.header import head_rows

    run = _waiting(monkeypatch, 0.5)
    assert run.step.waited_ns is not None and 0.45 < run.step.waited_ns / run.step.wall_ns < 0.55
    text = dict(head_rows(run, full=True))["measured"]
    assert " % of it waiting for a core (too much for alarms and savings: is the machine idle?)" in text
    why = "the steps waited too long for a core"
    assert f"{why}, so no time-based findings, time savings or limits are given" in run.notes
    assert not any(finding.predicted_saving_ns for finding in run.findings)


@pytest.mark.unsteady
def test_no_step_waits_longer_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's figure holds what lies between steps, too."""
    step = _waiting(monkeypatch, 1.2).step
    assert step.waited_ns == step.wall_ns


@pytest.mark.unsteady
@pytest.mark.parametrize("text", [None, "", "1 x 3"])
def test_a_system_that_does_not_tell(text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("gradscope.capture.system._SCHEDULER", str(file))
    model = nn.Linear(4, 1)
    run = gradscope.profile(model, torch.ones(4, 4), warmup=1).data
    assert run.step.waited_ns is None


def test_steps_in_which_something_is_compiled_do_not_count_where_others_do() -> None:
    made, plain = StepCost(30 * MS, 30 * MS, compiled=True), StepCost(10 * MS, 10 * MS)
    assert compiling([plain, made, plain]) == [1]
    assert compiling([made, plain]) == [0] and compiling([made, plain, made]) == [] == compiling([made])


@pytest.mark.unsteady
@pytest.mark.parametrize(("step", "looks"), [(0, False), (1, False), (1, True)])
def test_a_step_that_compiles_is_left_out_and_measured_again(
    step: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one in which all modules are looked at behind a compilation; and the first of the others."""
    from gradscope.report.header import head_rows

    monkeypatch.setattr(timed, "interrupted", lambda costs: [0] if len(costs) > 2 else [])
    _compiling(monkeypatch, {1 + step}, timed.Timed, looks)  # behind the one that settles
    run = gradscope.profile(nn.Linear(8, 1), torch.ones(4, 8), steps=4, warmup=1).data
    work = run.workload
    assert (work.steps, work.steps_left_out, work.steps_compiling) == (4, 2, 1)
    assert [each.left_out for each in run.step.taken] == [True, True, False, False, False, False]
    measured = dict(head_rows(run, full=True))["measured"]
    assert "4 of 6 steps" in measured and "2 left out, 1 interrupted by torch.compile, 1 by the system" in measured


@pytest.mark.unsteady
@pytest.mark.parametrize(
    ("alone", "measured", "wall"),
    [
        ({0, 1, 2, 3}, {0}, "others"),  # those behind the measured steps do not compile
        (set(range(6)), {0}, None),  # there is none to compare with
        (set(range(6)), set(range(9)), "all"),
        ({0}, set(range(9)), "compiling"),
        ({0}, {1, 2, 3, 5, 6}, "all"),  # most of those that count do
    ],
)
def test_overhead_is_told_against_steps_that_compile_as_those_that_count_do(
    alone: set[int], measured: set[int], wall: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscope.report.header import head_rows

    monkeypatch.setattr(timed, "interrupted", lambda costs: [])
    _compiling(monkeypatch, alone, timed.Unprofiled)
    _compiling(monkeypatch, measured, timed.Timed)
    model, x = nn.Linear(8, 1), torch.ones(4, 8)
    with gradscope.profiling(model, steps=4, warmup=1) as prof:
        while True:
            model(x).sum().backward()
            if prof.step():
                break
    capture, run = prof._session.capture, prof.report.data  # type: ignore[union-attr]
    assert (len(capture.unprofiled_ns), len(capture.unprofiled_compiling_ns)) == (6 - len(alone), len(alone))
    walls = {
        "others": capture.unprofiled_ns,
        "compiling": capture.unprofiled_compiling_ns,
        "all": capture.unprofiled_ns + capture.unprofiled_compiling_ns,
        None: None,
    }[wall]
    assert run.step.unprofiled_wall_ns == (walls and round(statistics.median(walls)))
    assert (run.step.overhead is None) is ("overhead not measured" in dict(head_rows(run, full=True))["measured"])
    assert (run.step.overhead is None) is (wall is None)


def _compiling(monkeypatch: pytest.MonkeyPatch, steps: set[int], kind: type[Phase], looks: bool = False) -> None:
    """Have something compiled in steps of such phases, of which ``steps`` are the numbers."""
    begun: list[Phase] = []
    begin = kind.begin_step

    def begin_step(self: Phase) -> None:
        begin(self)
        if len(begun) in steps and looks:
            self.run.hooks_aside.looks += 1
        elif len(begun) in steps:
            self.run.compilations += 1
        begun.append(self)

    monkeypatch.setattr(kind, "begin_step", begin_step)
