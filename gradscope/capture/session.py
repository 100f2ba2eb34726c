"""The course of one run: a session is told where each step ends, and takes it through the phases.

The same session serves model mode, script mode and the user's own loop; they differ in who calls :meth:`boundary`.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import Counter
from contextlib import ExitStack, suppress

from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscope.capture.backward import BackwardWatch
from gradscope.capture.compiler_watch import COMPILED_GRAPHS, CompilerWatch
from gradscope.capture.compiling import compile_facts, left_alone
from gradscope.capture.environment import rank_and_size
from gradscope.capture.guard import Guard
from gradscope.capture.memory import Surroundings
from gradscope.capture.modes import letting_others_leave
from gradscope.capture.phases import EventReader, Phase, Run, StepRecorder, plan
from gradscope.capture.result import Capture
from gradscope.capture.survey import is_own
from gradscope.compat import (
    CompiledSteps,
    graph_task_id,
    require_no_profiler,
    sequence_number,
    watch_profilers,
)
from gradscope.errors import UsageError
from gradscope.process import room_for_files
from gradscope.tables import Options, Progress

#: Steps in which the user's own profiler may run before nothing more is waited for.
MOST_GIVEN_WAY = 100
#: Steps in which the program may interrupt a phase, before it is left out: each of them is lost to the program.
MOST_INTERRUPTED = 3

_KEEPING = "storing the names for the report"  # under which the guard notes an error


class Session:
    """Feeds :meth:`boundary` calls through the phases.

    ``with Session(options, progress) as session:`` and then one :meth:`boundary` after each training step, until it
    answers True. Leaving the block undoes every hook, patch, mode and profiler, at whatever point the run ended.

    Nothing here raises in the middle of the user's run. A phase that fails is left out, with a note. Where the user's
    code runs a profiler of its own, of which a process has one at a time, ours stops; the phase is run again later.

    Raises:
        UsageError: on entry, where another session or a profiler runs in this process.
    """

    def __init__(
        self,
        options: Options,
        progress: Progress | None = None,
        surroundings: Surroundings | None = None,
        recorder: StepRecorder | None = None,
        reader: EventReader | None = None,
    ) -> None:
        capture = Capture(options)
        guard = Guard(capture.failed)
        self.run = Run(capture, surroundings or Surroundings(), guard, recorder, BackwardWatch(guard))
        self.run.reader = reader
        capture.registry.models = self.surroundings.models
        self.finished = False
        self.displaceable = False  # it ends where another one begins
        self.displaced_after: int | None = None  # steps, where one did
        self.steps_given_way = 0  # that ended while the user's own profiler ran
        self._progress = progress or Progress()
        self.run.say = self._progress.say
        self._phases = plan(self.run)
        self._number = -1
        self._entered = False  # whether the current phase measures
        self._exits = ExitStack()  # of the current phase
        self._installed = ExitStack()
        self._compiler = CompilerWatch(self.run, self._progress.busy)
        self._closed = False
        self._abandoned = False
        self._steps = CompiledSteps()
        self._trainer: threading.Thread | None = None  # whose steps count
        self._postponed = False  # a step ended inside the engine
        self._paused = False
        self._drawn = 0  # the autograd nodes of this thread, when the last step ended
        self._halved = False  # the pause began inside a step, as far as can be told
        self._left = False  # the current phase, for as long as the pause lasts
        self._turning = False  # from one step to the next: what happens meanwhile is no step
        self._interrupted_in: Counter[int] = Counter()  # phases, by number
        self._others = 0  # profilers of the user's that run now
        self._began = False  # one began since the last boundary
        self._disturbed = False  # one ran since then

    def __enter__(self) -> Session:
        _claim(self)
        with ExitStack() as stack:  # of what is undone where the rest of this fails
            stack.callback(_release, self)
            stack.callback(self.run.hooks_aside.room.close)
            stack.enter_context(self.run.backward.installed())
            stack.enter_context(self.run.loaders.installed())
            stack.enter_context(watch_profilers(self._give_way, self._other_ended))
            self._compiler.begin(stack)
            stack.enter_context(letting_others_leave(is_own))
            stack.callback(self.run.sampler.stop)
            stack.callback(self.run.line_mode.release)
            # Not when the memory pass begins: that may be inside one of these hooks, which torch is iterating over.
            note = self._steps.hook(self.run.guard.hook("recording optimizers", self.surroundings.note_optimizer))
            stack.callback(register_optimizer_step_post_hook(note).remove)
            self.backward.settled = self._settle
            stack.callback(setattr, self.backward, "settled", None)  # else the run would hold itself alive
            self._installed = stack.pop_all()
        try:
            self._next_phase()
            self._begin_step()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def capture(self) -> Capture:
        """What was found so far."""
        return self.run.capture

    @property
    def surroundings(self) -> Surroundings:
        """What is known of the user's objects."""
        return self.run.surroundings

    @property
    def backward(self) -> BackwardWatch:
        """The watch on the engine."""
        return self.run.backward

    @property
    def is_abandoned(self) -> bool:
        """Check that this is a forked process, which does not measure."""
        return self._abandoned

    @property
    def total_steps(self) -> int:
        """Training steps that the whole run takes."""
        return sum(phase.steps for phase in self._phases)

    @property
    def has_all(self) -> bool:
        """Check that the report would be whole if the run ended now."""
        return all(phase.optional for phase in self._phases[self._number :])

    @property
    def phase(self) -> str:
        """The name of the phase that runs; of the last one where all have ended."""
        return self._phases[min(self._number, len(self._phases) - 1)].name

    def boundary(self) -> bool:
        """A step has ended. Returns True when enough has been measured."""
        if self._abandoned:
            return False  # a forked process runs on as it would alone
        if self.finished or self._closed:
            return True
        if not self._trains_here():
            return False
        self._trainer = threading.current_thread()
        if graph_task_id() != -1:
            # The engine restores this thread's modes when it returns: the phase may not change before.
            self._postponed = True
            return False
        if self._turning:  # a signal's handler or a finalizer of the user's trains
            return False
        if self._paused:  # all through the step: it is no whole one
            self.capture.steps_cut += 1
            self._halved = False
            self.resume()
            return self.finished
        self._turning = True
        try:
            with room_for_files():
                return self._turn()
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._turning = False

    def _turn(self) -> bool:
        compiled = self._steps.take()
        if compiled is not None:
            self.surroundings.note_optimizer(compiled, (), {})
        self.capture.steps_done += 1
        self.capture.ranks = self.capture.ranks or rank_and_size()
        self.capture.registry.step = self.capture.steps_done
        self._compiler.end_step(self.capture.steps_done)
        phase = self._phases[self._number]
        began, self._began = self._began, False
        if phase.undisturbed and self._is_disturbed():
            self.steps_given_way += began or self._others
            self._restart()
            self.finished = self.steps_given_way >= MOST_GIVEN_WAY
        elif not self._entered and phase.name in self.run.guard.failed:
            self._next_phase()
        elif not self._entered:
            self._enter()  # after one whole step without the other profiler: its rows are all closed by now
        else:
            self._progress.advance()
            phase.done += 1
            with self.run.guard.over(phase.name):
                phase.end_step()
            if phase.done >= phase.steps or phase.name in self.run.guard.failed:
                self._leave()
                self._next_phase()
        self._begin_step()
        return self.finished

    def pause(self) -> None:
        """Leave out what runs until :meth:`resume`, an evaluation say, and what has run since the last step.

        Where that made a graph it was the half of a step: then the rest of that step is left out too.
        """
        if self._paused or self._closed or self.finished or self._turning or graph_task_id() != -1:
            return
        if not self._trains_here():
            return
        self._paused = self.capture.paused = True
        self._halved = sequence_number() != self._drawn
        if self._entered:
            with room_for_files():
                self._pause(self._phases[self._number])

    def _pause(self, phase: Phase) -> None:
        if phase.optional:  # it would wait for steps that nothing runs between
            self._leave()
            self._next_phase()
            return
        goes_on = False
        with self.run.guard.over(phase.name):
            goes_on = phase.pause()
        if not goes_on:
            self._restart()
            self._left = True

    def resume(self) -> None:
        """A step begins, after :meth:`pause`; nothing happens where it was called inside of one."""
        if not self._paused or self._halved or self._closed or not self._trains_here():
            return
        self._paused, left, self._left = False, self._left, False
        phase = self._phases[min(self._number, len(self._phases) - 1)]
        with room_for_files():
            if self._entered and phase.undisturbed and self._others:
                self._restart()  # one began on another thread, during the pause
            elif self._entered:
                with self.run.guard.over(phase.name):
                    phase.resume()
            elif left and not self._others:
                self._enter()
        self._begin_step()

    def close(self) -> None:
        """Undo everything; what was measured so far stays in :attr:`capture`."""
        if self._closed:
            return
        self._closed = self._compiler.closed = True
        self.capture.steps_needed = sum(phase.steps_in_all() for phase in self._phases)
        try:
            with room_for_files():
                self._leave()
        finally:
            self.run.guard.close("ending the run", self._installed)
            with self.run.guard.over("ending the run"):
                self.run.hooks_aside.end()
            with self.run.guard.over(_KEEPING):
                self.capture.hold()
            with self.run.guard.over(COMPILED_GRAPHS):
                facts = compile_facts(self.run.compile_log, self.capture.compiled, left_alone(self.capture.registry))
                self.capture.settings = {**self.capture.settings, "compiled": facts}
            self._steps.take()
            with self.run.guard.over(_KEEPING):
                self.surroundings.forget()
            self.capture.registry.models = tuple
            self._progress.done()
            self.capture.given_way = self.steps_given_way
            self.capture.captured = self.backward.captured
            self.capture.passes_compiled = self.backward.compiled

    def abandon(self) -> None:
        """Let go in a process that was forked: no profiler runs here, and what was measured is the parent's."""
        self._closed = self._compiler.closed = self._abandoned = True
        self.run.profiler = None
        for stack in (self._exits, self._installed):
            self.run.guard.close("leaving a forked process", stack)

    def _trains_here(self) -> bool:
        """Check that steps of this thread count: no other thread that lives has ended one before."""
        trainer = self._trainer
        return trainer is None or not trainer.is_alive() or trainer is threading.current_thread()

    # -- phases --------------------------------------------------------------------------------------------------------

    def _next_phase(self) -> None:
        self._number += 1
        while self._number < len(self._phases) and not self._fits(self._phases[self._number]):
            self._number += 1
        if self._number == len(self._phases):
            self.finished = True
            # A program that runs on compiles what is left of it as without gradscope.
            self._compiler.stop()
            with self.run.guard.over(_KEEPING):
                self.capture.hold()
            return
        phase = self._phases[self._number]
        self._progress.phase(phase.name, phase.steps)
        if not (phase.undisturbed and self._is_disturbed()):
            self._enter()

    def _fits(self, phase: Phase) -> bool:
        with self.run.guard.over(phase.name):
            return phase.fits()
        return False

    def _enter(self) -> None:
        phase = self._phases[self._number]
        self._entered = True
        try:
            with ExitStack() as exits:
                phase.enter(exits)
                self._exits = exits.pop_all()
        except BaseException as error:
            self._entered = False
            if not isinstance(error, Exception):
                raise
            self.run.guard.note(phase.name, error)
            self._next_phase()

    def _leave(self) -> None:
        """Undo what the phase put up, and keep what it found."""
        if not self._entered:
            return
        self._entered = False
        phase = self._phases[self._number]
        self.run.guard.close(phase.name, self._exits)
        with self.run.guard.over(phase.name):
            phase.keep()

    def _restart(self) -> None:
        """Drop what the phase has found and put it in the way of a later step."""
        if self._entered:
            self._entered = False
            phase = self._phases[self._number]
            self.run.guard.close(phase.name, self._exits)
            self._phases[self._number] = phase.again()

    def _interrupted(self) -> None:
        """A signal's handler of the program's has raised: what the phase has on is off until it begins anew."""
        if self.finished:
            return
        phase = self._phases[self._number]
        self.run.guard.close(phase.name, self._exits)
        self._restart()
        if phase.done:  # it was being left
            self._phases[self._number] = phase.again()
        self._interrupted_in[self._number] += 1
        if self._interrupted_in[self._number] >= MOST_INTERRUPTED:
            self.run.guard.failed.setdefault(phase.name, "the program interrupts it, by a time limit of each step say")

    def _begin_step(self) -> None:
        if not self.finished and self._entered:
            phase = self._phases[self._number]
            with self.run.guard.over(phase.name):
                phase.begin_step()
        self._drawn = sequence_number()

    def _settle(self) -> None:
        """The outermost backward pass has returned."""
        if self._postponed:
            self._postponed = False
            self.boundary()

    # -- the user's own profiler ---------------------------------------------------------------------------------------

    def _is_disturbed(self) -> bool:
        disturbed = self._disturbed or self._others > 0
        self._disturbed = self._others > 0
        return disturbed

    def _give_way(self) -> None:
        """The user's code is about to start a profiler: ours stops first, whichever thread this is."""
        if self._closed or self.finished:
            return
        self._others = 1
        self._began = self._disturbed = True
        if not self._phases[self._number].undisturbed:
            return
        here = self._trainer is None or self._trainer is threading.current_thread()
        if here and graph_task_id() == -1:
            self._restart()  # at once, so that none of our rows get into the other's trace
        else:
            with self.run.guard.over("pausing for another profiler"):
                self.run.stop_profiling()

    def _other_ended(self) -> None:
        self._others = 0


# -- one at a time -----------------------------------------------------------------------------------------------------

_current: weakref.ref[Session] | None = None
_lock = threading.Lock()


def _claim(session: Session) -> None:
    """Make it the session of this process.

    Raises:
        UsageError: there is one, or a profiler runs.
    """
    global _current
    before = _current() if _current is not None else None
    if before is not None and before.displaceable and before._trains_here():  # else its modes are another thread's
        before.displaced_after = None if before.finished else before.capture.steps_done
        before.close()
    with _lock:
        if _current is not None and _current() is not None:
            raise UsageError(
                "gradscope is already measuring in this process, and PyTorch allows one profiler per "
                "process.\nWait until the first measurement ends; this one changed nothing."
            )
        require_no_profiler()
        _current = weakref.ref(session)


def _release(session: Session) -> None:
    global _current
    with _lock:
        if _current is not None and _current() is session:
            _current = None


def is_measuring() -> bool:
    """Check that a session runs in this process that does not end where another one begins."""
    session = _current() if _current is not None else None
    return session is not None and not session.displaceable


def _after_fork() -> None:
    session = _current() if _current is not None else None
    if session is not None:
        session.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    """End what was begun by hand and never ended: the process would crash over a profiler that runs."""
    session = _current() if _current is not None else None
    if session is not None and not session.is_abandoned:
        with suppress(Exception):
            session.close()
