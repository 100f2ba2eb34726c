"""Where the steps of somebody else's training loop end, found without an edit of it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscope.capture.backward import STEP_ENDS, BackwardWatch
from gradscope.capture.environment import rank_and_size
from gradscope.capture.guard import Guard
from gradscope.capture.registry import Seen
from gradscope.capture.result import StepsOfOptimizer
from gradscope.compat import CompiledSteps, graph_task_id
from gradscope.devices import is_capturing
from gradscope.interrupts import is_interruption
from gradscope.process import note_ended_early, objects_of

# Optimizer steps after which no cycle is looked for any more: a step is then a round, see CycleFinder.
_LONGEST = 256
# While an optimizer exists that has not stepped yet, so many steps of the others are waited for it.
_CYCLE_PATIENCE = 12
# Broken more often than that, an order is irregular.
_MOST_BROKEN = 2
# Optimizers that have not stepped within so many steps take no part any more.
_RECENT = 64


class CycleFinder:
    """Told of every optimizer step, says where a training step ends: with the last one of a cycle.

    A cycle is believed once it was seen twice in a row and holds every optimizer. It ends where the optimizer that
    ended it has stepped as often as in the cycle that was seen, so that one odd step does not shift all that follow.
    Where the order is broken it is looked for once more; where it stays broken, or no cycle is found, a training step
    ends where the optimizer steps that ended the last one.

    Args:
        waiting: whether an optimizer was built that has not stepped yet.
    """

    def __init__(self, waiting: Callable[[], bool]) -> None:
        self.cycle: tuple[int, ...] = ()  # the optimizers' numbers, in order; empty until it is known
        self.irregular = False
        self.passed_over = 0  # training steps that went by while the cycle was looked for
        self._waiting = waiting
        self._order: list[int] = []
        self._since: list[int] = []  # since the last end
        self._broken = 0

    @property
    def unordered(self) -> tuple[int, int]:
        """How many optimizers have stepped, and how often all in all, while the cycle was looked for the last time."""
        return len(set(self._order)), len(self._order)

    def counts(self) -> dict[int, int]:
        """How often each optimizer steps in a training step, in the order of the cycle."""
        return dict(Counter(self.cycle))

    def advance(self, number: int) -> bool:
        """An optimizer has stepped; whether a training step ends with that."""
        if self.cycle:
            return self._follow(number)
        self._order.append(number)
        return self._find()

    def _find(self) -> bool:
        period = _period(self._order)
        if period and (len(self._order) >= _CYCLE_PATIENCE or not self._waiting()):
            self._believe(tuple(self._order[-period:]))
            return True
        if len(self._order) >= _LONGEST:
            self.irregular = True
            self._believe(_round(self._order))
            return True
        return False

    def _believe(self, cycle: tuple[int, ...]) -> None:
        self.cycle = cycle
        self.passed_over += self._order.count(cycle[-1]) // cycle.count(cycle[-1]) - 1

    def _follow(self, number: int) -> bool:
        self._since.append(number)
        last = self.cycle[-1]
        ended = number == last and self._since.count(last) >= self.cycle.count(last)
        if ended:
            broken = Counter(self._since) != Counter(self.cycle)
        else:
            broken = self._since.count(number) > self.cycle.count(number)
        if broken and not self.irregular:
            return self._learn_again()
        if ended:
            self._since = []
        return ended

    def _learn_again(self) -> bool:
        self._broken += 1
        self._order, self._since, before = list(self._since), [], self.cycle
        if self._broken > _MOST_BROKEN:
            self.irregular = True
            self.cycle = _round([*before, *self._order])
            return self._order[-1] == self.cycle[-1]
        self.cycle = ()
        return self._find()


def _period(order: list[int]) -> int:
    """The length of the shortest cycle that was just seen twice and holds every optimizer; 0 where there is none."""
    every = set(order[-_RECENT:])
    for length in range(len(every), len(order) // 2 + 1):
        if order[-length:] == order[-2 * length : -length] and set(order[-length:]) == every:
            return length
    return 0


def _round(order: list[int]) -> tuple[int, ...]:
    """The optimizers in the order of their first step: the rarest of them ends a round."""
    count = Counter(order)
    return tuple(sorted(count, key=lambda number: -count[number]))


# A script that has built an optimizer is given this many backward passes of its main thread to step it (gradient
# accumulation) before each of them counts as a step of its own.
_PATIENCE = 256

# A pass that makes a graph of itself is to be gone through by a later one. Of a program that makes nothing but such
# passes this many are taken for that.
_LEAD_ON = 8

# Stands in a round for all optimizers that step while a backward pass runs: they step once a pass, and are many.
_INSIDE_BACKWARD = -1


class StopRun(BaseException):
    """Ends the user's script after the last step; a BaseException, so that ``except Exception`` lets it through."""


class StepListener(Protocol):
    """Whom a :class:`StepFinder` tells of steps: a session."""

    @property
    def backward(self) -> BackwardWatch:
        """Whose ``ended`` is told of each backward pass."""

    def boundary(self) -> bool:
        """A step has ended; True when it was the last that is wanted."""


class StepFinder:
    """Calls ``session.boundary()`` at the end of each training step of the process.

    A step ends at ``optimizer.step()``. With several optimizers it is a whole cycle of them, found by watching: see
    :class:`~gradscope.capture.training.CycleFinder`. Optimizers that step inside backward end it when the backward pass
    returns. Without any optimizer it ends with each outermost backward pass, but for those that make a graph which a
    later one goes through (``create_graph=True``: a gradient penalty, an inner step).

    After the last step :class:`StopRun` is raised, once, and in the main thread only.

    Args:
        run_to_end: never raise it.
        say: told why the script runs on although it was to be stopped.
        guard: notes what goes wrong here.
    """

    def __init__(
        self,
        session: StepListener,
        *,
        run_to_end: bool = False,
        say: Callable[[str], None] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._session = session
        self._guard = guard or Guard()
        self._stops = not run_to_end
        self._say = say or (lambda _text: None)
        self._raised = False
        self.cycles = CycleFinder(self._is_waiting)
        self.cycle: list[StepsOfOptimizer] = []  # of a training step; empty where there is one optimizer
        self._described: tuple[int, ...] = ()
        self._seen: Seen[Optimizer] = Seen()
        self._trainer: threading.Thread | None = None  # whose optimizers count
        self._compiled = CompiledSteps()
        self._inside = False  # an optimizer has stepped in the backward pass that runs
        self.backwards = 0  # outermost passes that have ended
        self._mains = 0  # of the main thread's, while an optimizer was waited for
        self._graphs_made = 0  # by passes
        self._has_plain = False  # a pass made none
        self._optimizer_exists: bool | None = None
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # built before: not the script's

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every optimizer and every backward pass while the block runs."""
        with self._guard.over(STEP_ENDS):
            self._others.update(_optimizers())
        handle = register_optimizer_step_post_hook(self._compiled.hook(self._guard.hook(STEP_ENDS, self._stepped)))
        self._session.backward.ended = self._went_backward
        try:
            yield
        finally:
            self._session.backward.ended = None
            handle.remove()
            self._compiled.take()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if is_capturing():  # a step of every replay, of which nobody is told
            return
        number = self._seen.number(optimizer)
        if graph_task_id() != -1:
            self._inside = True
        elif self._is_trainer():  # threads that train side by side have no cycle in common
            self._advance(number)

    @property
    def stepped(self) -> bool:
        """Check that an optimizer has stepped."""
        return self._inside or len(self._seen) > 0

    def _is_trainer(self) -> bool:
        """Check that this is the thread in which an optimizer stepped first, of those that live."""
        thread = threading.current_thread()
        if self._trainer is None or not self._trainer.is_alive():
            self._trainer = thread
        return self._trainer is thread

    def _advance(self, number: int) -> None:
        """An optimizer has stepped, or all those inside of a backward pass have."""
        if self.cycles.advance(number):
            if self._described != self.cycles.cycle:
                self._described = self.cycles.cycle
                self.cycle = self._describe()
            self._boundary()

    def _is_waiting(self) -> bool:
        """Check that the script has built an optimizer that has not stepped yet.

        One whose parameters others step already is a wrapper of theirs, as accelerate's, and never steps by itself.
        """
        stepped = list(self._seen)
        trained = {number for each in stepped for number in _parameters(each)}
        return any(
            not any(each is other for other in stepped)
            and each not in self._others
            and not ((held := _parameters(each)) and trained.issuperset(held))
            for each in _optimizers()
        )

    def _describe(self) -> list[StepsOfOptimizer]:
        found = []
        counts = self.cycles.counts()
        for number, count in counts.items() if len(counts) > 1 else ():
            optimizer = self._seen[number] if number != _INSIDE_BACKWARD else None
            parameters = frozenset(_parameters(optimizer) if optimizer is not None else ())
            name = "optimizers inside backward" if optimizer is None else type(optimizer).__name__
            found.append(StepsOfOptimizer(name, parameters, count))
        return found

    def _went_backward(self, makes_graph: bool = False) -> None:
        self.backwards += 1
        if self._inside:
            self._inside = False
            self._advance(_INSIDE_BACKWARD)
        if self._compiled.take() is not None and self._is_trainer() and not len(self._seen):
            self._boundary()  # the step of this pass's optimizer ended after the pass before
            return
        if len(self._seen):
            return
        if self._leads_on(makes_graph):
            return
        if not self._has_optimizer():
            self._boundary()
        elif threading.current_thread() is threading.main_thread():  # another thread may only evaluate
            self._mains += 1
            if self._mains > _PATIENCE:
                self._boundary()

    def _leads_on(self, makes_graph: bool) -> bool:
        """Check that a later backward pass of the same step goes through the graph that this one made."""
        self._has_plain |= not makes_graph
        self._graphs_made += makes_graph
        return makes_graph and (self._has_plain or self._graphs_made <= _LEAD_ON)

    def _has_optimizer(self) -> bool:
        # Walking all objects costs some 50 ms: only at the first pass and then rarely.
        # Threads that count at the same time may skip a number: never without a first look.
        if self._optimizer_exists is None or self.backwards & (self.backwards - 1) == 0:
            self._optimizer_exists = any(optimizer not in self._others for optimizer in _optimizers())
        return self._optimizer_exists

    def _boundary(self) -> None:
        if not self._session.boundary() or not self._stops:
            return
        if rank_and_size() is not None:  # the other ranks would wait for this one
            self._stops = False
            return
        if threading.current_thread() is not threading.main_thread():
            self._stops = False
            self._say(
                "all steps are measured. The script trains in a thread, which cannot be stopped, so it runs to its end"
            )
        elif self._raised:
            self._stops = False
            self._say("all steps are measured, but the script caught the stop signal, so it runs to its end")
        else:
            self._raised = True
            note_ended_early()
            raise StopRun


def was_stopped(error: BaseException | None) -> bool:
    """Check that ``error`` is :class:`StopRun`, or was raised while that was being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StopRun):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _parameters(optimizer: Optimizer) -> list[int]:
    """Ids of what it holds; none where a class of the user's does not say."""
    try:
        return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    except Exception as error:
        if is_interruption(error):
            raise
        return []


def _optimizers() -> list[Optimizer]:
    """Every optimizer of the process."""
    return objects_of(Optimizer)
