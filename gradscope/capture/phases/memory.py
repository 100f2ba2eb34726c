"""The steps in which the allocators report: see :mod:`gradscope.capture.memory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from gradscope import markers
from gradscope.capture.backward import Around
from gradscope.capture.budget import MEMORY_PASS
from gradscope.capture.memory import STEPS, MemoryPass, MemoryTracer, Surroundings, finished_pass
from gradscope.capture.modules import MODULE_CALLS, CallRecorder
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.survey import LineTracer
from gradscope.compat import TraceMarker, new_profiler, start_memory_profiler, without_rows


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


class Memory(Phase):
    """A profiler of its own, which records what is allocated, and where."""

    name = "memory"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._steps: MemorySteps | None = None
        self._inner = ExitStack()

    def fits(self) -> bool:
        if self.run.budget.has_memory_pass():
            return True
        self.run.leave_out([MEMORY_PASS])
        return False

    def enter(self, exits: ExitStack) -> None:
        exits.callback(self._close)
        self.resume()

    def _close(self) -> None:
        self._inner.close()

    def _settle(self) -> None:
        """Watch the first step for allocations alone.

        The allocator of the CPU remembers from one profiler to the next what it has reported; where rows would fill
        the memory, only that is wanted of this step.
        """
        with ExitStack() as inner:
            inner.enter_context(without_rows())
            inner.enter_context(self.run.profiling(new_profiler(memory=True), start_memory_profiler))
            self._inner = inner.pop_all()

    def _measure(self, *, settled: bool) -> None:
        with ExitStack() as inner:
            self._put_up(inner, settled=settled)
            self._inner = inner.pop_all()

    def _put_up(self, exits: ExitStack, *, settled: bool) -> None:
        run = self.run
        with_lines = run.capture.options.lines and run.may_trace()
        steps = self._steps = MemorySteps(
            run.surroundings,
            LineTracer(run.line_mode, run.guard),
            CallRecorder(run.guard, run.capture.registry, run.hooks_aside),
        )
        exits.enter_context(steps.recorder.recording())
        exits.enter_context(steps.tracer.tracing())
        run.capture.compiled.reads = steps.tracer.note_reads  # what it raises the watch tells of
        exits.callback(setattr, run.capture.compiled, "reads", None)
        exits.enter_context(run.marking_backward(_around(steps.tracer, steps.lines if with_lines else None)))
        exits.enter_context(run.profiling(steps.profiler, start_memory_profiler))
        if with_lines:
            exits.enter_context(run.beside_graphs())
            exits.enter_context(run.leaving_fast_paths())
            exits.enter_context(steps.lines.recording())
        if settled:
            steps.begin_settled()
        else:
            steps.begin()

    def begin_step(self) -> None:
        if self._steps is not None:
            self._steps.recorder.begin_step()

    def end_step(self) -> None:
        if self._steps is None:
            self._inner.close()
            self._measure(settled=True)
        else:
            self._steps.recorder.end_step()
            self._steps.end_step()

    def pause(self) -> bool:
        self._inner.close()
        self._steps = None
        return True

    def resume(self) -> None:
        if self.done:
            self._measure(settled=True)
        elif self.run.budget.settles_lightly():
            self._settle()
        else:
            self._measure(settled=False)

    def keep(self) -> None:
        if self._steps is not None and not self.run.guard.failed.keys() & {self.name, MODULE_CALLS}:
            found = self.run.capture.memory = self._steps.result()
            if found is not None:
                found.notes += self._other_batch(self._steps.tracer.batches)
                found.census = [*self.run.capture.census, *found.census]
                if self.run.reader is not None:  # what the profiler holds takes more than its rows
                    found.table, found.profiler = self.run.reader.memory(found.profiler), None

    def _other_batch(self, seen: Mapping[int, list[str]]) -> list[str]:
        """A note where the step was called with another batch than the one that the report names."""
        for root, batch in self.run.capture.batches.items():
            if batch and seen.get(root) and batch not in seen[root]:
                return [f"memory was measured in a step whose batch was {seen[root][0]}, not {batch}"]
        return []


def _around(tracer: MemoryTracer, lines: LineTracer | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        with tracer.around_backward(roots), lines.inside_backward() if lines is not None else nullcontext():
            yield

    return around
