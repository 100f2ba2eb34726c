"""What a phase is, and what all phases of a run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gradscope import markers
from gradscope.capture.aside import FOLLOWING, Aside
from gradscope.capture.backward import Around, BackwardWatch
from gradscope.capture.budget import Budget
from gradscope.capture.fast_paths import leaving_fast_paths
from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.capture.loop import LineSampler, LoaderWatch
from gradscope.capture.memory import Surroundings
from gradscope.capture.result import Capture
from gradscope.capture.storages import take_census
from gradscope.capture.survey import LineMode, Tracer, is_own
from gradscope.capture.system import FaultMeter
from gradscope.capture.uncompiled import uses_compile
from gradscope.compat import (
    CompileLog,
    compiled_frames,
    is_switched_off,
    marking_recompute,
    marking_waits,
    start_profiler,
    stop_profiler,
)
from gradscope.tables import EventTable

_T = TypeVar("_T")


class StepRecorder(Tracer, Protocol):
    """Writes down the torch calls of a step."""

    failed: Exception | None  # what went wrong in the writing
    interrupted: bool  # the program interrupted it

    def watching(self, guard: Guard, aside: HooksAside) -> AbstractContextManager[None]:
        """Until the block is left; the guard notes what goes wrong in a hook, of which ``aside`` takes care."""

    def inside_backward(self) -> AbstractContextManager[None]:
        """Around what runs inside the engine."""

    def below(self, run: Callable[[], _T]) -> _T:
        """Call ``run``, which is a model's forward pass and its loss."""


class EventReader(Protocol):
    """Reads what profilers recorded, as ``gradscope.trace`` does, and lets go of what they hold."""

    def timed(self, profiler: Any, *, calls: bool = True) -> EventTable:
        """The rows of steps that were timed; without those of module calls where these could not all be noted."""

    def surveyed(self, profiler: Any, *, shapes: bool, flops: bool) -> EventTable:
        """The rows of the survey."""

    def memory(self, profiler: Any) -> EventTable:
        """The rows of the memory pass."""


def _say_nothing(_text: str) -> None:
    pass


@dataclass
class Run:
    """What the phases of one run share: whom they ask, and where they put what they found."""

    capture: Capture
    surroundings: Surroundings
    guard: Guard = field(default_factory=Guard)
    recorder: StepRecorder | None = None
    backward: BackwardWatch = field(default_factory=BackwardWatch)
    aside: Aside = field(default_factory=lambda: Aside(is_own))
    hooks_aside: HooksAside = field(default_factory=HooksAside)
    line_mode: LineMode = field(init=False)
    faults: FaultMeter = field(default_factory=FaultMeter)
    compiled_before: int = field(default_factory=compiled_frames)
    follows_dynamo: bool = True  # unless this torch does not tell where compiled code begins
    has_compiled: bool = False  # Dynamo, anything: its own count of frames leaves out those with fullgraph=True
    compile_log: CompileLog = field(default_factory=CompileLog)
    compilations: int = 0  # of torch.compile that have begun
    profiler: Any = None  # gradscope's own, while it runs
    reader: EventReader | None = (
        None  # reads each pass before the next needs the memory; without it all is read at the end
    )
    say: Callable[[str], None] = _say_nothing  # tells the user something while the run goes on
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.line_mode = LineMode(aside=self.aside)
        self.budget = Budget(self.capture.options.memory_budget)
        self.loaders = LoaderWatch(self.guard)
        self.sampler = LineSampler(self.guard)

    def uses_compile(self) -> bool:
        """Check that compiled code runs: something was compiled or run since the run began, or lies in reach."""
        return (
            self.has_compiled
            or self.capture.compiled.has_run
            or (not is_switched_off() and uses_compile(self.capture.registry.alive(), self.compiled_before))
        )

    def may_trace(self) -> bool:
        """Check that modes of ours may be put on: nothing is compiled, or they are kept away from what is."""
        if not self.uses_compile():
            return True
        return self.follows_dynamo and (bool(self.capture.compiled.graphs) or not self._has_compiled())

    def _has_compiled(self) -> bool:
        """Check that something is: torch may compile nothing of a layer of its own, and nothing of an LSTM."""
        if self.capture.compiled.has_run or self.compiled_before:
            return True
        return (self.has_compiled or compiled_frames() > 0) and self.compile_log.has_compiled()

    def interruptions(self) -> int:
        """How often something was compiled, and looked for behind that, so far: a step with one is longer for it."""
        return self.compilations + self.hooks_aside.looks

    @contextmanager
    def beside_graphs(self) -> Iterator[None]:
        """Keep modes of ours away from graphs that run, until the block is left."""
        self.capture.compiled.around = lambda: self.guard.around(FOLLOWING, self.aside.inside)
        try:
            yield
        finally:
            self.capture.compiled.around = None

    def leaving_fast_paths(self) -> AbstractContextManager[None]:
        """Keep modes of ours out of layers that would compute another way with them."""
        return leaving_fast_paths(self.guard, self.hooks_aside, self.aside)

    def leave_out(self, what: Sequence[str]) -> None:
        """Note what is not measured, for the budget's sake."""
        self.capture.left_out += what
        self.capture.rows = self.budget.rows

    @contextmanager
    def marking_backward(self, around: Around | None = None, nested: Around | None = None) -> Iterator[None]:
        """Let each backward pass write its row, inside of ``around``; one that runs inside of another of ``nested``.

        So do recomputes, and waits for other ranks.
        """
        self.backward.mark, self.backward.around, self.backward.nested = True, around, nested
        try:
            with marking_recompute(markers.RECOMPUTE + "0"), marking_waits():
                yield
        finally:
            self.backward.mark, self.backward.around, self.backward.nested = False, None, None

    @contextmanager
    def profiling(self, profiler: Any, start: Callable[[Any], object] = start_profiler) -> Iterator[None]:
        """Run a profiler until the block is left, or until :meth:`stop_profiling`."""
        with ExitStack() as stack:
            kept = start(profiler)
            self.profiler = profiler
            stack.callback(self.stop_profiling)
            yield
        del kept  # a memory profiler needs it until here

    def take_census(self) -> None:
        """Count what is alive now that a step has ended; only a pass that measures memory asks for it."""
        if self.capture.options.memory:
            with self.guard.over("counting live tensors"):
                self.capture.census.append(take_census(self.surroundings.optimizers))

    def stop_profiling(self) -> None:
        """Stop gradscope's own profiler, where one runs."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            stop_profiler(profiler)


class Phase:
    """Steps that are measured in one way; one object is entered and left at most once.

    Attributes:
        name: as it is shown, and as errors are noted under.
        steps: how many it takes.
        undisturbed: whether its steps count only while no other profiler runs.
        optional: whether the report is whole without it.
        done: steps that have ended.
    """

    name: str
    undisturbed = True
    optional = False

    def __init__(self, run: Run, steps: int) -> None:
        self.run = run
        self.steps = steps
        self.done = 0

    def again(self) -> Phase:
        """One that is as this one was before it was entered."""
        return type(self)(self.run, self.steps)

    def steps_in_all(self) -> int:
        """How many it takes, as far as that is known by now; more than ``steps`` where it will ask for more."""
        return self.steps

    def fits(self) -> bool:
        """Check that the phase takes place at all; asked when its turn has come."""
        return True

    def enter(self, exits: ExitStack) -> None:
        """Begin, between two steps; what is to be undone at the end goes onto ``exits``."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_step(self) -> None:
        """A step has ended; ``done`` counts it already."""

    def pause(self) -> bool:
        """Stop for a while, and drop what was seen since the last step; False where the phase must begin anew."""
        return False

    def resume(self) -> None:
        """Go on, as a step begins."""

    def keep(self) -> None:
        """Put what was found into the capture: all has been undone. The run may have ended early, see ``done``."""
