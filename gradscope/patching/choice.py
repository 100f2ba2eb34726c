"""Which of the places that are right stay in: the whole step decides.

Groups of places are put in one after the other, and the step is measured in turns as it is, with the first, with the
first two and so on: what a group saves is the difference to the state before it, so that the groups' savings are the
step's, whatever they do to each other. A group that makes the step slower, or neither faster nor leaner, is taken out,
and what is left is measured anew, until all of it stands.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradscope.patching.sites import Site
from gradscope.patching.turns import SECONDS, Side, Times, Told, Way, measured, told
from gradscope.trace.memory import peaks_bytes

# A peak that differs by less is the same: masks and numbers of one call.
LEAST_BYTES = 0.01
_FEW_BYTES = 16 << 10

SLOWER = "the step is slower with it"
NO_GAIN = "the step is neither faster nor leaner with it, beyond noise"
HUNGRIER = "the step needs more memory with it"
NOT_TOGETHER = "it shows no gain together with the others"

Group = tuple[Site, ...]  # the same change of the same text, wherever it is run


@dataclass(frozen=True)
class Saved:
    """What a part of the change saves of a step; negative is a loss."""

    ns: int
    bytes: int
    time: Told = Told.NOTHING  # what a step takes with it, beside without


@dataclass(frozen=True)
class Gain:
    """The step without and with what is kept."""

    before: Side
    after: Side
    time: Told = Told.NOTHING  # of the second, beside the first

    @property
    def saved_ns(self) -> int:
        """Time saved a step; negative where it is lost."""
        return self.before.wall_ns - self.after.wall_ns

    @property
    def saved_bytes(self) -> int:
        """Peak memory saved; negative where it is lost."""
        return self.before.peak_bytes - self.after.peak_bytes


@dataclass
class Choice:
    """What stays, what it saves, and why the rest does not."""

    kept: list[Group]
    gain: Gain | None = None  # None where nothing stays
    before: Side | None = None  # the step as it is; None where there was nothing to measure
    saved: dict[Group, Saved] = field(default_factory=dict)
    reasons: dict[Group, str] = field(default_factory=dict)  # of those that do not stay


def choose(
    groups: Sequence[Group],
    way: Callable[[Sequence[Group]], Way],
    device: torch.device,
    say: Callable[[str], object] = str,
) -> Choice:
    """Keep what makes the step faster or leaner, and neither slower nor hungrier.

    Args:
        groups: in the order in which they are put in; those that save the most memory first, for they hide the others.
        way: the step with some of them in.
        device: where it runs.
        say: told what is being measured.
    """
    choice = Choice(list(groups))
    shown: set[Group] = set()  # to make the step faster: once is enough
    end = time.perf_counter() + SECONDS
    while choice.kept:
        recipes = dict.fromkeys(group[0].recipe for group in choice.kept)
        say(f"measuring the step without and with {', '.join(recipes)}")
        chain = _Chain(choice.kept, way, device, max(0.0, end - time.perf_counter()))
        choice.saved |= chain.saved
        choice.before = chain.gain.before
        reasons = chain.reasons(shown)
        shown |= {group for group, change in chain.change.items() if change is Told.LESS}
        if not reasons and chain.stands:
            choice.gain = chain.gain
            break
        reasons = reasons or chain.weakest()
        choice.reasons |= reasons
        choice.kept = [group for group in choice.kept if group not in reasons]
    return choice


class _Chain:
    """The step as it is and with one group more in each state, measured in turns."""

    def __init__(
        self, groups: Sequence[Group], way: Callable[[Sequence[Group]], Way], device: torch.device, seconds: float
    ) -> None:
        self._groups, self._way, self._device = list(groups), way, device
        last = len(groups)
        ways = [way(groups[:count]) for count in range(last + 1)]
        pairs = [(place, place + 1) for place in range(last)]
        times, peaks = measured(ways, device, pairs=pairs, sized=(0, last), settled=True, seconds=seconds)
        self._peaks = peaks
        self._sides = [each.side(peak) for each, peak in zip(times, peaks, strict=True)]
        self.gain = Gain(self._sides[0], self._sides[-1], told(times[0], times[-1]))
        self.change: Mapping[Group, Told] = dict(zip(groups, _changes(times), strict=True))
        self.saved = {
            group: Saved(before.wall_ns - after.wall_ns, before.peak_bytes - after.peak_bytes, self.change[group])
            for group, (before, after) in zip(groups, itertools.pairwise(self._sides), strict=True)
        }

    @property
    def stands(self) -> bool:
        """Return whether the whole is faster or leaner, and not slower."""
        if self.gain.time is Told.NOTHING:
            return self._much(self.gain.saved_bytes)
        return self.gain.time is Told.LESS

    def reasons(self, shown: set[Group]) -> dict[Group, str]:
        """Of the groups that are worse than none, or no better; ``shown`` are known to make the step faster."""
        found = {group: SLOWER for group, change in self.change.items() if change is Told.MORE}
        idle = [
            group
            for group, change in self.change.items()
            if change is Told.NOTHING and group not in shown and not self._much(self.saved[group].bytes)
        ]
        found |= dict.fromkeys(self._needless(idle), NO_GAIN)
        if self._much(-self.gain.saved_bytes):
            losses = {group: self.saved[group].bytes for group in self._groups if group not in found}
            worst = min(losses, key=lambda group: losses[group], default=None)
            if worst is not None and losses[worst] < 0:
                found[worst] = HUNGRIER
        return found

    def _needless(self, idle: Sequence[Group]) -> list[Group]:
        """Those without which the step needs no more memory: what saves some may show it behind others only."""
        if not idle:
            return []
        without = [self._way([group for group in self._groups if group != each]) for each in idle]
        peaks = peaks_bytes([way.peak for way in without], self._device, settled=True)
        return [group for group, peak in zip(idle, peaks, strict=True) if not self._much(peak - self._peaks[-1])]

    def weakest(self) -> dict[Group, str]:
        """The group that saves the least time."""
        return {min(self._groups, key=lambda group: self.saved[group].ns): NOT_TOGETHER}

    def _much(self, more: int) -> bool:
        return much(more, self._peaks[0])


def much(more: int, peak: int) -> bool:
    """Return whether so many bytes are more than noise in a step of that peak."""
    return more > max(LEAST_BYTES * peak, _FEW_BYTES)


def _changes(times: Sequence[Times]) -> list[Told]:
    return list(itertools.starmap(told, itertools.pairwise(times)))
