"""The steps that are timed, under the profiler, and those without one that they are compared with.

The profiler holds every row until it stops. Where steps are of many operations, one profiler sees few of them, is read,
and a step without a profiler follows before the next begins.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from gradscope import markers
from gradscope.capture.backward import TENSOR_HOOKS, TensorHooks
from gradscope.capture.byhand import BY_HAND
from gradscope.capture.modules import CALL_COST, MODULE_CALLS, CallRecorder, measure_call_cost
from gradscope.capture.passes import PassRecorder
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.reducers import reducers_of
from gradscope.capture.result import TimedSteps
from gradscope.capture.system import StepCost, compiling, interrupted, without_core_ns
from gradscope.compat import TraceMarker, new_profiler
from gradscope.devices import synchronize
from gradscope.tables import TakenStep

# The first profiled step pays for the profiler's own first touch of every buffer (measured: x1.5 to x3): dropped.
SETTLING_STEPS = 1

WALKING = 0.01  # of a step may go to walking the graphs of its passes: as little as steps differ by themselves

OWNERS = "detecting models whose submodules are called"  # under which the guard notes an error


class Timed(Phase):
    """Module calls, backward passes and steps write their rows into the running trace."""

    name = "profiled steps"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        recorder = CallRecorder(run.guard, run.capture.registry, run.hooks_aside)
        self._hooks = TensorHooks(run.guard)
        self._timed = TimedSteps(None, recorder, PassRecorder(recorder, self._hooks))
        self._planned = self._wanted = steps  # the second grows where steps were interrupted, or compiled
        self._interruptions = 0  # when the step began
        self._costs: list[StepCost] = []  # of the steps after the settling ones
        self._find_owners = False  # no model is known by name
        self._began: tuple[int, int] | None = None  # the step that runs: clock, and processor time
        self._waited: int | None = None  # for a core, when it began; None where the system does not tell
        self._stretch = ExitStack()  # of the profiler that runs
        self._in_stretch = 0  # steps that it has seen
        self._goes_on = False  # a stretch was cut short by a pause

    def again(self) -> Timed:
        return Timed(self.run, self._planned)

    def enter(self, exits: ExitStack) -> None:
        options = self.run.capture.options
        step_ns = statistics.median(self.run.capture.unprofiled_ns or [0])
        warning = self.run.budget.warning(options.steps, step_ns, memory=options.memory)
        if warning is not None:
            self.run.say(warning)
        self._timed.passes.spare_ns = round(WALKING * step_ns)
        with self.run.guard.over(CALL_COST):
            self._timed.recorder.cost = measure_call_cost(self.run.guard)
        exits.callback(setattr, self.run.loaders, "counting", False)
        if not list(self.run.surroundings.models()):
            exits.callback(self.run.capture.registry.find_owners)
            self._find_owners = True
        self.run.capture.compiled.told = self.run.guard.hook(MODULE_CALLS, self._timed.recorder.look_for_models)
        exits.callback(setattr, self.run.capture.compiled, "told", None)
        exits.callback(self._timed.passes.forget)
        with self.run.guard.over(TENSOR_HOOKS):
            exits.enter_context(self._hooks.marking())
        exits.callback(self._close)
        self._begin_stretch()

    def steps_in_all(self) -> int:
        """One more between each two stretches that are to come."""
        if self.run.reader is None:
            return self.steps
        left = self._wanted - self._timed.completed + (0 if self._timed.profiler is None else self._in_stretch)
        return self.steps + max(-(-left // self.run.budget.steps_at_once()) - 1, 0)

    def _close(self) -> None:
        self._stretch.close()

    def _begin_stretch(self) -> None:
        self._timed.profiler = new_profiler()
        with ExitStack() as stretch:
            stretch.enter_context(self._timed.recorder.recording())
            stretch.enter_context(self.run.marking_backward(self._timed.passes.around, self._timed.passes.inside))
            stretch.enter_context(self.run.profiling(self._timed.profiler))
            self._timed.passes.begin_step()
            self._mark()
            self._stretch = stretch.pop_all()
        self._in_stretch = 0
        self._waited = without_core_ns()

    def begin_step(self) -> None:
        self._began = None if self._timed.profiler is None else _now()
        self._interruptions = self.run.interruptions()
        if self._began is not None:
            self._timed.recorder.begin_step()

    def end_step(self) -> None:
        synchronize()
        now = _now()
        if self._timed.profiler is None:  # a step between two stretches
            self._begin_stretch()
            return
        with TraceMarker(markers.OWN + "0"):
            self._note_step(now)
        self._mark()
        self.run.loaders.counting = True  # the step before pays for the profiler's first touch
        full = self._in_stretch >= self.run.budget.steps_at_once()
        if full and self._timed.completed < self._wanted and self.run.reader is not None:
            self._stretch.close()
            read_timed(self.run, self._timed, self._in_stretch)
            self.run.loaders.counting = False
            self.steps += 1

    def _note_step(self, now: tuple[int, int]) -> None:
        """Keep what the step that ended at ``now`` cost, and begin the next: a user's loop does nothing of it."""
        before, after = self._waited, without_core_ns()
        waited = 0 if before is None or after is None else max(0, after - before)
        self._timed.completed += 1
        self._timed.recorder.end_step()
        if self._began is not None and self._timed.completed > SETTLING_STEPS:
            self._costs.append(
                StepCost(
                    now[0] - self._began[0],
                    now[1] - self._began[1],
                    waited,
                    self._interruptions != self.run.interruptions(),
                )
            )
        self._measure_again()
        if self._timed.completed == SETTLING_STEPS:
            with self.run.guard.over(BY_HAND):
                self._look_for_calls_by_hand()
            if self._find_owners:  # of parts that the user replaces in later steps
                with self.run.guard.over(OWNERS):
                    self.run.capture.registry.find_owners()
        self._timed.passes.begin_step()
        self._in_stretch += 1
        self._waited = without_core_ns()

    def _look_for_calls_by_hand(self) -> None:
        run, timed = self.run, self._timed
        # Dynamo guards the code of a forward, and would compile it anew.
        if not run.uses_compile():
            timed.recorder.look_for_calls_by_hand(timed.passes.leaves, run.surroundings.models())

    def _measure_again(self) -> None:
        """Take more steps in the place of those that do not count, once all are taken; as many again at most."""
        if self._timed.completed == self._wanted:
            planned = self._planned - SETTLING_STEPS
            counting = [cost for cost in self._costs if not cost.compiled]
            missing = planned - (len(counting) - len(interrupted(counting)))
            more = max(0, min(missing, self._planned + planned - self._wanted))
            self._wanted += more
            self.steps += more

    def _left_out(self) -> set[int]:
        """Indices of steps that do not count: something was compiled in them, or the system interrupted them."""
        found = set(compiling(self._costs))
        others = [number for number in range(len(self._costs)) if number not in found]
        return found | {others[index] for index in interrupted([self._costs[number] for number in others])}

    def pause(self) -> bool:
        """Read the steps so far: the profiler would hold the rows of whatever runs now."""
        if self.run.reader is None:
            return False
        self._goes_on = self._timed.profiler is not None
        self._stretch.close()
        read_timed(self.run, self._timed, self._in_stretch)
        self._timed.profiler = None  # one that saw no whole step has nothing to be read
        self._in_stretch = 0
        self.run.loaders.counting = False
        return True

    def resume(self) -> None:
        if self._goes_on:
            self._begin_stretch()
            self.run.loaders.counting = self._timed.completed >= SETTLING_STEPS

    def _mark(self) -> None:
        with TraceMarker(markers.STEP + str(self._timed.completed)):
            pass

    def keep(self) -> None:
        self._timed.last_steps = self._in_stretch
        left_out = self._left_out()
        self._timed.left_out = frozenset(SETTLING_STEPS + number for number in left_out)
        self._timed.compiling = len(compiling(self._costs))
        self._timed.compiled = sum(cost.compiled for number, cost in enumerate(self._costs) if number not in left_out)
        self._timed.taken = [TakenStep(cost.wall_ns, number in left_out) for number, cost in enumerate(self._costs)]
        kept = [cost.waited_ns for number, cost in enumerate(self._costs) if number not in left_out]
        if kept and self._waited is not None:
            self._timed.waited_ns = round(statistics.mean(kept))
        with self.run.guard.over("reading DDP's buckets"):
            registry = self.run.capture.registry  # later the models may be gone
            self._timed.reducers = reducers_of(registry.alive(), registry.get, registry.owners_of)
        self.run.capture.timed = self._timed


def _now() -> tuple[int, int]:
    return time.perf_counter_ns(), time.process_time_ns()


def read_timed(run: Run, timed: TimedSteps, steps: int) -> None:
    """Turn what the last profiler recorded, of so many steps, into columns, and let go of it."""
    if run.reader is None or timed.profiler is None or steps == 0:
        return
    table = run.reader.timed(timed.profiler, calls=MODULE_CALLS not in run.guard.failed)
    timed.profiler = None
    timed.tables.append(table)
    run.budget.read(len(table), steps)


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

    def pause(self) -> bool:
        self.run.sampler.stop()
        return True

    def resume(self) -> None:
        if self.done:
            self.run.sampler.start()


class Unprofiled(Phase):
    """The wall time of steps that nothing watches."""

    name = "unprofiled steps"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._started_ns, self._interruptions = 0, 0
        self._walls_ns: list[int] = []
        self._compiling_ns: list[int] = []  # of those in which something was compiled

    def begin_step(self) -> None:
        self.run.faults.start()
        self.run.budget.begin_step()
        self._interruptions = self.run.interruptions()
        self._started_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        synchronize()
        self.run.budget.end_step()
        took = time.perf_counter_ns() - self._started_ns
        (self._walls_ns if self._interruptions == self.run.interruptions() else self._compiling_ns).append(took)
        self.run.faults.stop()

    def pause(self) -> bool:
        return True  # a step begins anew

    def keep(self) -> None:
        self.run.capture.unprofiled_ns += self._walls_ns
        self.run.capture.unprofiled_compiling_ns += self._compiling_ns
