"""The steps of the memory pass."""

from __future__ import annotations

from gradscope import markers
from gradscope.capture.memory import STEPS, MemoryPass, MemoryTracer, Surroundings, finished_pass
from gradscope.capture.modules import CallRecorder
from gradscope.capture.survey import LineTracer
from gradscope.compat import TraceMarker, new_profiler


class MemorySteps:
    """Marks where they begin and end, and looks at what lives between them."""

    def __init__(self, surroundings: Surroundings, lines: LineTracer, recorder: CallRecorder) -> None:
        self.profiler = new_profiler(memory=True)
        self.recorder = recorder
        self.tracer = MemoryTracer(self.recorder, surroundings)
        self.lines = lines
        self.completed = 0

    def begin(self) -> None:
        """The first step begins."""
        self._mark()

    def begin_settled(self) -> None:
        """The second step begins; the first ran under a profiler of its own."""
        self._mark()
        self.completed = STEPS - 1
        self.tracer.see_all()
        self._mark()

    def end_step(self) -> None:
        """A step has ended."""
        self.completed += 1
        # Looking at every tensor takes a while, which is to lie outside of the measured step on both sides.
        if self.completed == STEPS:
            self._mark()
            self.tracer.see_all()
        else:
            self.tracer.see_all()
            self.tracer.batches.clear()
            self._mark()

    def _mark(self) -> None:
        with TraceMarker(markers.STEP + str(self.completed)):
            pass

    def result(self) -> MemoryPass | None:
        """What they left behind; None where the run ended before them."""
        if self.completed < STEPS:
            return None
        return finished_pass(self.profiler, self.recorder, self.tracer, self.lines)
