"""The steps that are timed, under the profiler."""

from __future__ import annotations

from contextlib import ExitStack

from gradscope import markers
from gradscope.capture.engine import synchronize
from gradscope.capture.left import TimedSteps
from gradscope.capture.modules import CallRecorder
from gradscope.capture.passes import PassRecorder
from gradscope.capture.phases.base import Phase, Run
from gradscope.compat import TraceMarker, new_profiler

# The first profiled step pays for the profiler's own first touch of every buffer (measured: x1.5 to x3): dropped.
SETTLING_STEPS = 1


class Timed(Phase):
    """Module calls, backward passes and steps write their rows into the running trace."""

    name = "profiled steps"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        recorder = CallRecorder(run.guard, run.capture.registry)
        self._timed = TimedSteps(None, recorder, PassRecorder(recorder))

    def enter(self, exits: ExitStack) -> None:
        self._timed.profiler = new_profiler()
        exits.callback(setattr, self.run.loaders, "counting", False)
        if not list(self.run.surroundings.models()):
            exits.callback(self.run.capture.registry.find_owners)
        exits.callback(self._timed.passes.forget)
        exits.enter_context(self._timed.recorder.recording())
        exits.enter_context(self.run.marking_backward(self._timed.passes.around))
        exits.enter_context(self.run.profiling(self._timed.profiler))
        self._mark()

    def end_step(self) -> None:
        synchronize()
        self._timed.completed = self.done
        self._timed.passes.begin_step()
        self._mark()
        self.run.loaders.counting = True  # the step before pays for the profiler's first touch

    def _mark(self) -> None:
        with TraceMarker(markers.STEP + str(self._timed.completed)):
            pass

    def keep(self) -> None:
        self.run.capture.timed = self._timed
