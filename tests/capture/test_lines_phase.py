"""Which steps are traced by line again, and until when: told by made-up calls. Counts, no clock."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradscope.capture.memory import Surroundings
from gradscope.capture.phases.base import Run
from gradscope.capture.phases.lines import Lines
from gradscope.capture.result import Capture
from gradscope.capture.variety import StepBounds
from gradscope.tables import Options, SpanTable


class Ran:
    """Stands in for the recorder of some steps, each of one call; the layer that it calls is all that differs."""

    def __init__(self, *layers: int) -> None:
        self.layers = list(layers)
        self.next: list[int] = []

    def table(self) -> SpanTable:
        low = 10 * np.arange(len(self.layers))
        return SpanTable(np.array(self.layers, np.int64), low, low + 8, caller=np.full(len(low), 50))

    @property
    def steps(self) -> list[StepBounds]:
        return [StepBounds(at, 10 * at, at + 1, 10 * at + 9) for at in range(len(self.layers))]

    def begin_step(self) -> None:
        pass

    def end_step(self) -> None:
        self.layers.append(self.next.pop(0))


def lines(survey: Ran | None, memory: Ran | None, timed: Ran, budget: int = 100) -> Any:
    """The phase behind these; the first of the timed steps is the settling one."""
    run = Run(Capture(Options(steps=5)), Surroundings())
    capture: Any = run.capture
    capture.survey, capture.memory = (
        None if each is None else SimpleNamespace(recorder=each) for each in (survey, memory)
    )
    capture.timed = SimpleNamespace(recorder=timed, completed=len(timed.layers))
    run.budget.traced_steps = lambda: budget  # type: ignore[method-assign]
    return Lines(run, 0)


@pytest.mark.parametrize(
    ("survey", "memory", "timed", "fits"),
    [
        (Ran(1), None, Ran(1, 1, 1), False),
        (Ran(1), None, Ran(1, 1, 2), True),
        (Ran(1), None, Ran(2, 1, 1), False),  # the settling step is not measured
        (Ran(1), Ran(2, 3), Ran(1, 2, 3, 1), False),  # the memory pass has traced those
        (Ran(1), Ran(2, 3), Ran(1, 2, 4), True),
        (None, Ran(2, 3), Ran(1, 2, 4), False),  # without a survey nothing has lines
    ],
)
def test_steps_are_traced_where_timed_ones_did_something_else(
    survey: Ran | None, memory: Ran | None, timed: Ran, fits: bool
) -> None:
    assert lines(survey, memory, timed).fits() is fits


@pytest.mark.parametrize(("budget", "steps"), [(0, 0), (3, 3), (100, 12)])
def test_no_more_steps_than_the_memory_has_room_for(budget: int, steps: int) -> None:
    phase = lines(Ran(1), None, Ran(1, 2), budget)
    assert (phase.fits(), phase.steps) == (steps > 0, steps)


def traced(phase: Any, *layers: int, since_s: float = 0.0) -> int:
    """How many steps are traced, of a program that would run these, where tracing began so long ago."""
    assert phase.fits()
    phase._entered_s = time.monotonic() - since_s
    phase._recorder = Ran()
    phase._recorder.next = list(layers)
    while phase.done < phase.steps:
        phase.done += 1
        phase.end_step()
    return int(phase.done)


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        ((2, 3, 1, 1, 1, 1, 1), 2),  # all is known
        ((1,) * 12, 4),  # nothing is added
        ((2, *(1,) * 11), 5),  # nor any more: since the last that did
        ((1, 1, 1, 2, 1, 1, 1, 1, 1), 8),
        ((1, 1, 2, 1, 1, 1, 3, 1), 7),
    ],
)
def test_until_all_is_known_or_nothing_new_comes(layers: tuple[int, ...], steps: int) -> None:
    assert traced(lines(Ran(1), None, Ran(1, 2, 3)), *layers) == steps


def test_no_more_where_it_takes_long() -> None:
    assert traced(lines(Ran(1), None, Ran(1, 2, 3)), 2, 3, since_s=3600.0) == 1


def test_one_that_begins_again_knows_what_was_traced_before() -> None:
    """Where another profiler ran meanwhile the phase is made anew, and is not asked again whether it fits."""
    phase = lines(Ran(1), None, Ran(1, 1, 1, 2))
    assert phase.fits()
    again = phase.again()
    with ExitStack() as exits:
        again.enter(exits)
        assert again._missing == pytest.approx(1 / 3)
    again._recorder = Ran()
    again._recorder.next = [1, 2]
    for _ in range(2):
        again.done += 1
        again.end_step()
    assert again.steps == 2


@pytest.mark.parametrize("failed", [True, False])
def test_calls_that_could_not_all_be_noted_are_no_lines(failed: bool) -> None:
    phase = lines(Ran(1), None, Ran(1, 2))
    if failed:
        phase.run.guard.failed["recording module calls"] = "said"
    phase.keep()
    assert (phase.run.capture.traced is None) is failed
