"""The losses of a training script's first steps, and whether two runs of it have the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from gradscope import units
from gradscope.capture.backward import BackwardWatch
from gradscope.capture.training import StepFinder, StopRun
from gradscope.fixing.result import LossCurves
from gradscope.workload import Script

P = ParamSpec("P")
R = TypeVar("R")

# Two runs that round differently part slowly: below this share of the loss they are the same.
SAME = 0.01


class StepLimit:
    """Ends a script after so many steps, and keeps the losses that backward was called on."""

    def __init__(self, steps: int) -> None:
        self.backward = BackwardWatch()
        self.losses: list[float] = []
        self._left = steps

    def boundary(self) -> bool:
        """A step has ended."""
        self._left -= 1
        return self._left <= 0

    def run(self, script: Script) -> None:
        """Run the script until it ends or the steps are over.

        Raises:
            BaseException: what the script raises.
        """
        self.backward.mark, self.backward.around = True, self._noted
        with self.backward.installed(), StepFinder(self).watching():
            try:
                script.run()
            except StopRun:
                return

    def unnoted(self, look: Callable[P, R]) -> Callable[P, R]:
        """``look``, which may call backward in the middle of the script: those are no steps, nor losses of any."""

        def looked(*args: P.args, **kwargs: P.kwargs) -> R:
            watch = self.backward
            before = watch.around, watch.ended
            watch.around = watch.ended = None
            try:
                return look(*args, **kwargs)
            finally:
                watch.around, watch.ended = before

        return looked

    @contextmanager
    def _noted(self, roots: Any) -> Iterator[None]:
        self.losses.append(sum(float(root.detach().double().sum()) for root in roots))
        yield


def compare_curves(before: Sequence[float], after: Sequence[float], again: Sequence[float] | None = None) -> LossCurves:
    """Tell whether both runs have the same losses; ``again`` is a second run of the script as it is."""
    apart = difference(before, after)
    same, verdict = (
        True,
        f"The curves are the same: they differ by less than {units.percent(SAME, 0)} of the loss, as rounding does.",
    )
    if not before:
        same, verdict = False, "There is no curve: the script called backward in none of its steps."
    elif len(before) != len(after):
        same, verdict = False, f"The runs differ: backward was called {len(before)} times before, {len(after)} after."
    elif apart > SAME:
        own = difference(before, again) if again is not None else 0.0
        same = own > SAME
        verdict = (
            f"The curves part, but the script does not repeat itself: two runs as it is differ by {own:.1e}."
            if same
            else f"The curves part by {apart:.1e} of the loss, where two runs as it is differ by {own:.1e}."
        )
    return LossCurves(_finite(before), _finite(after), apart if math.isfinite(apart) else -1.0, same, verdict)


def _finite(losses: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(loss if math.isfinite(loss) else None for loss in losses)


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of a step's losses, as a share of the loss; infinite where one is not finite."""
    largest = 0.0
    for left, right in zip(one, other, strict=False):
        if math.isfinite(left) and math.isfinite(right):
            largest = max(largest, abs(right - left) / (abs(left) or 1.0))
        elif repr(left) != repr(right):
            return math.inf
    return largest
