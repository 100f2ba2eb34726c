"""More steps that are traced by line, where timed ones did what none that was traced has done."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from gradscope import markers
from gradscope.capture.modules import MODULE_CALLS, CallRecorder
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.phases.timed import SETTLING_STEPS
from gradscope.capture.result import TracedSteps
from gradscope.capture.survey import LineTracer
from gradscope.capture.variety import Variety
from gradscope.compat import TraceMarker, new_profiler

# Of the timed steps' autograd nodes, drawn where no traced step drew as many: one node of a thousand may be a slow one.
LEAST = 0.001
MOST = 12  # steps: where each one is another, some of what was timed is not met again
_IN_VAIN = 4  # steps in a row that have shown nothing of what is missing
_LONGEST_S = 60.0  # in all, where steps are long


class Lines(Phase):
    """The survey's lines, and those of the memory pass, are of three steps; a program may drop layers at random.

    Steps are traced until they have done what the timed ones did, or no longer add to it. None is where all are alike.
    """

    name = "source lines of more steps"
    optional = True

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._recorder = CallRecorder(run.guard, run.capture.registry, run.hooks_aside)
        self._tracer = LineTracer(run.line_mode, run.guard)
        self._profiler: Any = None
        self._known = Variety()
        self._missing = 0.0
        self._in_vain = 0
        self._entered_s = 0.0

    def fits(self) -> bool:
        run, capture = self.run, self.run.capture
        if capture.survey is None or not run.may_trace():
            return False
        self._look()
        self.steps = min(MOST, run.budget.traced_steps()) if self._missing > LEAST else 0
        return self.steps > 0

    def _look(self) -> None:
        """See what is missing, now that all other steps have been traced."""
        capture = self.run.capture
        for traced in (capture.survey, capture.memory):
            if traced is not None:
                self._known.add(traced.recorder.table(), traced.recorder.steps)
        self._missing = self._unseen()

    def _unseen(self) -> float:
        timed = self.run.capture.timed
        if timed is None:
            return 0.0
        settling = min(SETTLING_STEPS, timed.completed - 1)
        return self._known.unseen(timed.recorder.table(), timed.recorder.steps[settling:])

    def enter(self, exits: ExitStack) -> None:
        run = self.run
        self._look()
        self._entered_s = time.monotonic()
        exits.enter_context(self._recorder.recording())
        exits.enter_context(run.marking_backward(lambda _roots: self._tracer.inside_backward()))
        self._profiler = new_profiler()
        exits.enter_context(run.profiling(self._profiler))
        exits.enter_context(run.beside_graphs())
        exits.enter_context(run.leaving_fast_paths())
        exits.enter_context(self._tracer.recording())
        self._mark()

    def begin_step(self) -> None:
        self._recorder.begin_step()

    def end_step(self) -> None:
        self._recorder.end_step()
        self._mark()
        self._known.add(self._recorder.table(), self._recorder.steps[-1:])
        missing = self._unseen()
        self._in_vain = 0 if missing < self._missing else self._in_vain + 1
        self._missing = missing
        if missing <= LEAST or self._in_vain == _IN_VAIN or time.monotonic() - self._entered_s > _LONGEST_S:
            self.steps = self.done

    def _mark(self) -> None:
        with TraceMarker(markers.STEP + str(self.done)):
            pass

    def keep(self) -> None:
        if self.run.guard.failed.keys() & {self.name, MODULE_CALLS}:
            return
        traced = self.run.capture.traced = TracedSteps(
            self._profiler, self._recorder, self._tracer.spans.table(), self._tracer.lines
        )
        if self.run.reader is not None:
            traced.table = self.run.reader.surveyed(self._profiler, shapes=False, flops=False)
            traced.profiler = None
