"""The course of one run: warm-up, unprofiled steps, profiled steps, survey.

A session is told where each step ends and does the rest.

The same session serves model mode, script mode and the user's own loop; they differ in who calls :meth:`boundary`.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscope import markers
from gradscope.capture import memory as memory_pass
from gradscope.capture.engine import BackwardWatch, synchronize
from gradscope.capture.memory import MemoryPass, MemoryTracer, Surroundings
from gradscope.capture.modules import CallRecorder
from gradscope.capture.settings import current_settings, optimizer_fact
from gradscope.capture.storages import sizes_text, tensors_in
from gradscope.capture.survey import FlopMode, GraphTracer, LineMode, LineTracer, Tracer
from gradscope.compat import (
    TraceMarker,
    marking_recompute,
    new_profiler,
    start_memory_profiler,
    start_profiler,
    stop_profiler,
)
from gradscope.tables import GraphNode, LineInfo, OptimizerFact, Options, Progress, SpanTable

Around = Callable[[Any], AbstractContextManager[None]]

# The first profiled step pays for the profiler's own first touch of every buffer (measured: x1.5 to x3): dropped.
SETTLING_STEPS = 1


class StepRecorder(Tracer, Protocol):
    """Writes down the torch calls of a step."""

    def watching(self) -> AbstractContextManager[None]:
        """Until the block is left."""


@dataclass
class TimedSteps:
    """What the profiled steps left behind."""

    profiler: Any
    recorder: CallRecorder
    completed: int = 0  # steps that ended, the settling ones included


@dataclass
class SurveyStep:
    """What the survey left behind."""

    profiler: Any
    recorder: CallRecorder
    line_spans: SpanTable
    lines: list[LineInfo]
    graphs: list[tuple[GraphNode, ...]]
    parameters: list[torch.Tensor]
    has_flops: bool


@dataclass
class Capture:
    """Everything that a run left behind, before any of it is read."""

    options: Options
    timed: TimedSteps | None = None
    survey: SurveyStep | None = None
    memory: MemoryPass | None = None
    steps_done: int = 0  # of all phases
    unprofiled_ns: list[int] = field(default_factory=list)  # wall time of each unprofiled step
    notes: list[str] = field(default_factory=list)
    batch: str | None = None  # tensors that the survey's first model call was given: "4x256 int64"
    settings: dict[str, Any] = field(default_factory=dict)  # while the recorded step ran
    optimizers: list[OptimizerFact] = field(default_factory=list)
    with_gradient: frozenset[int] = frozenset()  # ids of the parameters that had a gradient after it
    optimized: frozenset[int] = frozenset()  # ids of the parameters that the optimizers hold


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    steps: int


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
        self._phases = _plan(options)
        self._phase = -1
        self._left = 0  # steps left in the phase
        self._exits = ExitStack()  # of the current phase
        self._installed = ExitStack()
        self._step_started_ns = 0
        self._memory: _MemorySteps | None = None
        self._line_mode = LineMode()
        self._closed = False
        self._compiled_before = _compiled_frames()

    def __enter__(self) -> Session:
        self._installed.enter_context(self.backward.installed())
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
        elif self.phase == "profiled steps":
            synchronize()
            self._mark_step()
        elif self._memory is not None:
            self._memory.end_step()
        self._progress.advance()
        self.capture.steps_done += 1
        self._left -= 1
        if self._left == 0:
            self._next_phase()
        self._step_started_ns = time.perf_counter_ns()
        return self.finished

    def close(self) -> None:
        """Undo everything; what was measured so far stays in :attr:`capture`."""
        if not self._closed:
            self._closed = True
            try:
                self._exits.close()
            finally:
                self._installed.close()
                self.surroundings.forget()
                self._progress.done()

    def _next_phase(self) -> None:
        self._exits.close()
        self._phase += 1
        if self._phase == len(self._phases):
            self.finished = True
            return
        phase = self._phases[self._phase]
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
        compiled = _uses_compile(timed.recorder.modules, self._compiled_before)
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
        known = timed.recorder.modules if timed is not None else []
        self._exits.callback(self._keep_facts, known)
        if self._recorder is not None and not _uses_compile(known, self._compiled_before):
            self._exits.enter_context(self._recorder.watching())
            self._line_mode.turn_on(self._recorder)
            self._exits.callback(self._line_mode.turn_off)

    def _keep_facts(self, known: list[nn.Module]) -> None:
        capture = self.capture
        capture.settings = current_settings()
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
        known = timed.recorder.modules if timed is not None else []
        models = self.surroundings.models
        self.surroundings.models = lambda: (*models(), *known)
        with_lines = self.capture.options.lines and not _uses_compile(known, self._compiled_before)
        steps = _MemorySteps(self.surroundings, LineTracer(self._line_mode))
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
        if steps.completed == memory_pass.STEPS:
            self.capture.memory = memory_pass.finished_pass(steps.profiler, steps.recorder, steps.tracer, steps.lines)

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


class _MemorySteps:
    """The steps of the memory pass."""

    def __init__(self, surroundings: Surroundings, lines: LineTracer) -> None:
        self.profiler = new_profiler(memory=True)
        self.recorder = CallRecorder()
        self.tracer = MemoryTracer(self.recorder, surroundings)
        self.lines = lines
        self.completed = 0

    def begin(self) -> None:
        """The first step begins."""
        self._mark()

    def end_step(self) -> None:
        """A step has ended."""
        self.completed += 1
        # Looking at every tensor takes a while, which is to lie outside of the measured step on both sides.
        if self.completed == memory_pass.STEPS:
            self._mark()
            self.tracer.see_all()
        else:
            self.tracer.see_all()
            self._mark()

    def _mark(self) -> None:
        with TraceMarker(markers.STEP + str(self.completed)):
            pass


def _around_memory(tracer: MemoryTracer, lines: LineTracer | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        with tracer.around_backward(roots), lines.inside_backward() if lines is not None else nullcontext():
            yield

    return around


def _plan(options: Options) -> list[_Phase]:
    memory = _Phase("memory", memory_pass.STEPS)
    if not options.timing:
        return [phase for phase in (_Phase("warm-up", options.warmup), memory) if phase.steps > 0]
    # Unprofiled steps also keep the profilers apart: a record_function that is open while one stops and the next
    # starts (the one around every optimizer.step is) ends in a crash of the process.
    phases = [
        _Phase("warm-up", options.warmup),
        _Phase("unprofiled steps", min(options.steps, 4)),
        _Phase("profiled steps", SETTLING_STEPS + options.steps),
        _Phase("unprofiled steps", 2),
        _Phase("survey", 1),
    ]
    phases.append(_Phase("recording", 1))
    if options.memory:
        phases.append(memory)
    return [phase for phase in phases if phase.steps > 0]


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


def _uses_compile(modules: list[nn.Module], compiled_before: int) -> bool:
    """Whether compiled code ran in these steps: compiled modules, compiled functions in reach, or a new compilation."""
    if _compiled_frames() > compiled_before:
        return True
    return any(
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or any("_torchdynamo_orig_callable" in getattr(value, "__dict__", ()) for value in _globals_of(module))
        for module in modules
    )


def _compiled_frames() -> int:
    """Frames that Dynamo has looked at so far; 0 where it was never loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0


def _globals_of(module: nn.Module) -> list[Any]:
    function = inspect.getattr_static(type(module), "forward", None)
    return list(getattr(function, "__globals__", {}).values())
