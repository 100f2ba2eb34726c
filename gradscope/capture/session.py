"""The course of one run: warm-up, unprofiled steps, profiled steps, survey.

A session is told where each step ends and does the rest.

The same session serves model mode, script mode and the user's own loop; they differ in who calls :meth:`boundary`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscope import markers
from gradscope.capture.compiled import compiled_frames, uses_compile
from gradscope.capture.engine import BackwardWatch, synchronize
from gradscope.capture.faults import FaultMeter
from gradscope.capture.left import Capture, SurveyStep, TimedSteps
from gradscope.capture.loading import LoaderWatch
from gradscope.capture.memory import MemoryTracer, Surroundings
from gradscope.capture.memory_steps import MemorySteps
from gradscope.capture.modules import CallRecorder
from gradscope.capture.phases import SETTLING_STEPS, plan
from gradscope.capture.sampling import LineSampler
from gradscope.capture.settings import current_settings, optimizer_fact
from gradscope.capture.storages import sizes_text, tensors_in
from gradscope.capture.survey import FlopMode, GraphTracer, LineMode, LineTracer, Tracer
from gradscope.capture.switches import SwitchWatch
from gradscope.compat import (
    TraceMarker,
    marking_recompute,
    new_profiler,
    start_memory_profiler,
    start_profiler,
    stop_profiler,
)
from gradscope.tables import Options, Progress

Around = Callable[[Any], AbstractContextManager[None]]


class StepRecorder(Tracer, Protocol):
    """Writes down the torch calls of a step."""

    def watching(self) -> AbstractContextManager[None]:
        """Until the block is left."""

    def inside_backward(self) -> AbstractContextManager[None]:
        """Around what runs inside the engine."""


class Session:
    """Feeds :meth:`boundary` calls through the phases.

    ``with Session(options, progress) as session:`` and then one :meth:`boundary` after each training step, until it
    answers True. Leaving the block undoes every hook, patch, mode and profiler, at whatever point the run ended.
    """

    def __init__(
        self,
        options: Options,
        progress: Progress | None = None,
        surroundings: Surroundings | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.capture = Capture(options)
        self._recorder = recorder
        self.finished = False
        self.surroundings = surroundings or Surroundings()
        self.backward = BackwardWatch()
        self._progress = progress or Progress()
        self._phases = plan(options)
        self._phase = -1
        self._left = 0  # steps left in the phase
        self._exits = ExitStack()  # of the current phase
        self._installed = ExitStack()
        self._step_started_ns = 0
        self._memory: MemorySteps | None = None
        self._line_mode = LineMode()
        self._closed = False
        self._compiled_before = compiled_frames()
        self._loaders, self._sampler, self._faults = LoaderWatch(), LineSampler(), FaultMeter()

    def __enter__(self) -> Session:
        self._installed.enter_context(self.backward.installed())
        self._installed.enter_context(self._loaders.installed())
        self._installed.callback(self._sampler.stop)
        self._installed.callback(self._line_mode.release)
        # Not when the memory pass begins: that may be inside one of these hooks, which torch is iterating over.
        handle = register_optimizer_step_post_hook(self.surroundings.note_optimizer)
        self._installed.callback(handle.remove)
        self._next_phase()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def phase(self) -> str:
        """Name of the phase that the next step belongs to."""
        return "finished" if self.finished else self._phases[self._phase].name

    @property
    def steps_to_first_result(self) -> int:
        """Training steps until one step was measured."""
        before = self._phases[: [phase.name for phase in self._phases].index("profiled steps")]
        return sum(phase.steps for phase in before) + SETTLING_STEPS + 1

    @property
    def total_steps(self) -> int:
        """Training steps that the whole run takes."""
        return sum(phase.steps for phase in self._phases)

    def boundary(self) -> bool:
        """A step has ended. Returns True when enough has been measured."""
        if self.finished or self._closed:
            return True
        if self.phase == "unprofiled steps":
            synchronize()
            self.capture.unprofiled_ns.append(time.perf_counter_ns() - self._step_started_ns)
            self._faults.stop()
        elif self.phase == "profiled steps":
            synchronize()
            self._mark_step()
            self._loaders.counting = True  # the step before pays for the profiler's first touch
        elif self.phase == "warm-up" and self._left > 1:
            self._sampler.start()  # not in the first step, where a loop begins
        elif self._memory is not None:
            self._memory.end_step()
        self._progress.advance()
        self.capture.steps_done += 1
        self._left -= 1
        if self._left == 0:
            self._next_phase()
        self._begin_step()
        return self.finished

    def close(self) -> None:
        """Undo everything; what was measured so far stays in :attr:`capture`."""
        if not self._closed:
            self._closed = True
            try:
                self._exits.close()
            finally:
                self._installed.close()
                self.capture.hold()
                self.surroundings.forget()
                self._progress.done()

    def _next_phase(self) -> None:
        self._exits.close()
        self._phase += 1
        if self._phase == len(self._phases):
            self.finished = True
            self.capture.hold()
            return
        phase = self._phases[self._phase]
        self._sampler.stop()
        self._loaders.counting = False
        self._left = phase.steps
        self._progress.phase(phase.name, phase.steps)
        if phase.name == "profiled steps":
            self._start_timing()
        elif phase.name == "survey":
            self._start_survey()
        elif phase.name == "recording":
            self._start_recording()
        elif phase.name == "memory":
            self._start_memory()
        self._begin_step()

    def _begin_step(self) -> None:
        if self.phase == "unprofiled steps":
            self._faults.start()
        self._step_started_ns = time.perf_counter_ns()

    def _start_timing(self) -> None:
        timed = TimedSteps(new_profiler(), CallRecorder())
        self.capture.timed = timed
        self._exits.enter_context(timed.recorder.recording())
        self._exits.enter_context(self._marking_backward())
        self._exits.enter_context(_Profiling(timed.profiler))
        with TraceMarker(markers.STEP + "0"):
            pass

    def _mark_step(self) -> None:
        timed = self.capture.timed
        assert timed is not None
        timed.completed += 1
        with TraceMarker(markers.STEP + str(timed.completed)):
            pass

    def _note_batch(self, args: Any) -> None:
        """Of the arguments, or where all are keywords of the batch that they come from."""
        if self.capture.batch is None:
            batch = self.surroundings.batch
            self.capture.batch = sizes_text(tensors_in(args)) or sizes_text(tensors_in(batch)) or None

    def _start_survey(self) -> None:
        timed = self.capture.timed
        assert timed is not None
        # Modes would send compiled code back to eager or break its graph: nodes of another step, other lines.
        compiled = uses_compile(timed.recorder.modules, self._compiled_before)
        if compiled:
            self.capture.notes.append("source lines and FLOPs are not measured: the model uses torch.compile")
        recorder, graph, tracer = CallRecorder(), GraphTracer(), LineTracer(self._line_mode)
        recorder.on_root_call = self._note_batch
        self._exits.callback(setattr, recorder, "on_root_call", None)  # else the run would hold itself alive
        profiler = new_profiler(shapes=True)
        with_lines = self.capture.options.lines and not compiled

        def keep() -> None:
            self.capture.survey = SurveyStep(
                profiler=profiler,
                recorder=recorder,
                line_spans=tracer.spans.table(),
                lines=tracer.lines,
                graphs=graph.graphs,
                parameters=graph.parameters,
                has_flops=not compiled,
            )

        self._exits.callback(keep)
        self._exits.enter_context(recorder.recording())
        around = _around_surveyed(graph, tracer if with_lines else None)
        self._exits.enter_context(self._marking_backward(around))
        self._exits.enter_context(_Profiling(profiler))
        if not compiled:
            self._exits.enter_context(FlopMode())
        if with_lines:
            self._exits.enter_context(tracer.recording())

    def _start_recording(self) -> None:
        """A step without a profiler: what torch is called with, and how torch is set."""
        timed = self.capture.timed
        known = timed.recorder.modules if timed is not None else ()
        switches = SwitchWatch()
        self._exits.callback(self._keep_facts, known, switches)
        self._exits.enter_context(switches.watching())
        recorder = self._recorder
        if recorder is not None and not uses_compile(known, self._compiled_before):
            self._exits.enter_context(recorder.watching())
            self._line_mode.turn_on(recorder)
            self._exits.callback(self._line_mode.turn_off)
        else:
            recorder = None
        self.backward.around = _around_recorded(switches, recorder)
        self._exits.callback(setattr, self.backward, "around", None)

    def _keep_facts(self, known: Iterable[nn.Module], switches: SwitchWatch) -> None:
        capture = self.capture
        measured = capture.timed.completed - SETTLING_STEPS if capture.timed is not None else 0
        capture.settings = {
            **switches.with_seen(current_settings()),
            "loaders": self._loaders.facts(measured),
            "between": self._sampler.facts(),
            "system": self._faults.facts(),
        }
        capture.optimizers = [optimizer_fact(each) for each in self.surroundings.optimizers]
        parameters = [each for module in (*known, *self.surroundings.models()) for each in module.parameters()]
        capture.with_gradient = frozenset(id(each) for each in parameters if each.grad is not None)
        capture.optimized = frozenset(
            id(each)
            for optimizer in self.surroundings.optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        )

    def _start_memory(self) -> None:
        timed = self.capture.timed
        known = timed.recorder.modules if timed is not None else ()
        models = self.surroundings.models
        self.surroundings.models = lambda: (*models(), *known)
        with_lines = self.capture.options.lines and not uses_compile(known, self._compiled_before)
        steps = MemorySteps(self.surroundings, LineTracer(self._line_mode))
        self._memory = steps
        self._exits.callback(self._keep_memory)
        self._exits.enter_context(steps.recorder.recording())
        self._exits.enter_context(steps.tracer.tracing())
        around = _around_memory(steps.tracer, steps.lines if with_lines else None)
        self._exits.enter_context(self._marking_backward(around))
        self._exits.enter_context(_Profiling(steps.profiler, start_memory_profiler))
        if with_lines:
            self._exits.enter_context(steps.lines.recording())
        steps.begin()

    def _keep_memory(self) -> None:
        steps, self._memory = self._memory, None
        assert steps is not None
        self.capture.memory = steps.result()

    @contextmanager
    def _marking_backward(self, around: Around | None = None) -> Iterator[None]:
        self.backward.mark, self.backward.around = True, around
        try:
            with marking_recompute(markers.RECOMPUTE + "0"):
                yield
        finally:
            self.backward.mark, self.backward.around = False, None


def _around_surveyed(graph: GraphTracer, tracer: LineTracer | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        with graph.tracing(roots), tracer.inside_backward() if tracer is not None else nullcontext():
            yield

    return around


def _around_recorded(switches: SwitchWatch, recorder: StepRecorder | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        switches.look()
        with recorder.inside_backward() if recorder is not None else nullcontext():
            yield

    return around


def _around_memory(tracer: MemoryTracer, lines: LineTracer | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        with tracer.around_backward(roots), lines.inside_backward() if lines is not None else nullcontext():
            yield

    return around


class _Profiling:
    """A running profiler; stops it, without kineto's log lines, on the way out."""

    def __init__(self, profiler: Any, start: Callable[[Any], object] = start_profiler) -> None:
        self._profiler, self._start = profiler, start
        self._kept: object = None

    def __enter__(self) -> None:
        self._kept = self._start(self._profiler)

    def __exit__(self, *exc: object) -> None:
        stop_profiler(self._profiler)
        self._kept = None
