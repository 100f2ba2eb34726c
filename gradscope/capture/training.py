"""Where the steps of somebody else's training loop end, found without an edit of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscope.capture.engine import BackwardWatch
from gradscope.capture.seen import Seen

# A script that has built an optimizer is given this many backward passes to step it (gradient accumulation) before
# each backward pass counts as a step of its own.
_PATIENCE = 256


class StopRun(BaseException):
    """Ends the user's script after the last step; a BaseException, so that ``except Exception`` lets it through."""


class Steps(Protocol):
    """Whom a :class:`StepFinder` tells of steps: a session."""

    backward: BackwardWatch

    def boundary(self) -> bool:
        """A step has ended; True when it was the last that is wanted."""


class StepFinder:
    """Calls ``session.boundary()`` at the end of each training step of the process.

    A step ends at ``optimizer.step()``. With several optimizers it is a whole round of them: until the one that
    stepped first steps again. Without any optimizer it ends with each outermost backward pass.
    """

    def __init__(self, session: Steps, *, run_to_end: bool = False) -> None:
        self._session = session
        self._run_to_end = run_to_end
        self._round: list[int] = []  # numbers of the optimizers that have stepped in this round
        self._last: int | None = None  # the one that ends a round, once a whole round was seen
        self._seen: Seen[Optimizer] = Seen()
        self._backwards = 0
        self._optimizer_exists = False
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # built before: not the script's
        self.saw_backward = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every optimizer and every backward pass while the block runs."""
        self._others.update(_optimizers())
        handle = register_optimizer_step_post_hook(self._stepped)
        self._session.backward.ended = self._went_backward
        try:
            yield
        finally:
            self._session.backward.ended = None
            handle.remove()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        number = self._seen.number(optimizer)
        if number in self._round:
            # Only when one steps again is it known where the round ended; from now on it ends there.
            self._last = self._round[-1]
            self._round = []
        self._round.append(number)
        if number == self._last:
            self._round = []
            self._boundary()

    def _went_backward(self) -> None:
        self.saw_backward = True
        self._backwards += 1
        if len(self._seen):
            return
        patience = _PATIENCE if self._has_optimizer() else 0
        if self._backwards > patience:
            self._boundary()

    def _has_optimizer(self) -> bool:
        # Walking all objects costs some 50 ms: only at the first pass and then rarely.
        if self._backwards & (self._backwards - 1) == 0:
            self._optimizer_exists = any(optimizer not in self._others for optimizer in _optimizers())
        return self._optimizer_exists

    def _boundary(self) -> None:
        if self._session.boundary() and not self._run_to_end:
            raise StopRun


def _optimizers() -> list[Optimizer]:
    """Every optimizer of the process."""
    return [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]
