"""Finds the cycle in which several optimizers step: three times the critic, once the generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

# Optimizer steps after which no cycle is looked for any more: a step is then a round, see CycleFinder.
_LONGEST = 256
# While an optimizer exists that has not stepped yet, so many steps of the others are waited for it.
_PATIENCE = 12
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
        if period and (len(self._order) >= _PATIENCE or not self._waiting()):
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
