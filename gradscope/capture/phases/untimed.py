"""Phases without a profiler: warm-up, and the steps that the measured overhead is compared with."""

from __future__ import annotations

import time
from contextlib import ExitStack

from gradscope.capture.engine import synchronize
from gradscope.capture.phases.base import Phase, Run


class WarmUp(Phase):
    """Nothing is measured yet, so the lines between the phases are sampled meanwhile."""

    name = "warm-up"
    undisturbed = False

    def enter(self, exits: ExitStack) -> None:
        exits.callback(self.run.sampler.stop)

    def begin_step(self) -> None:
        self.run.budget.begin_step()

    def end_step(self) -> None:
        self.run.budget.end_step()
        if self.done < self.steps:  # not in the first step, where a loop begins
            self.run.sampler.start()


class Unprofiled(Phase):
    """The wall time of steps that nothing watches."""

    name = "unprofiled steps"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._started_ns = 0
        self._walls_ns: list[int] = []

    def begin_step(self) -> None:
        self.run.faults.start()
        self.run.budget.begin_step()
        self._started_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        synchronize()
        self.run.budget.end_step()
        self._walls_ns.append(time.perf_counter_ns() - self._started_ns)
        self.run.faults.stop()

    def keep(self) -> None:
        self.run.capture.unprofiled_ns += self._walls_ns
