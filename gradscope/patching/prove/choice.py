"""Which of the places that are right stay in: the whole step decides, measured in turns with each state.

Groups of places are put in one after the other, and the step is measured in turns as it is, with the first, with the
first two and so on: what a group saves is the difference to the state before it, so that the groups' savings are the
step's, whatever they do to each other. A group that makes the step slower, or neither faster nor leaner, is taken out,
and what is left is measured anew, until all of it stands.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from gradscope.patching.sites import Site
from gradscope.trace.memory import peaks_bytes

# Several ways to do the same work, measured in turns, and what can be told of them beyond noise.
#
# A machine that slows down slows all ways, so what is compared is the difference between neighbours of one round, by
# a sign test: how often the one took less. Where other programs keep the cores busy, wall time scatters by more than
# most changes save; processor time, which scatters less, is then asked.


# Differences below this share of the work are not looked for: clocks and memory layout make them.
LEAST = 0.005
# Chance of as many rounds on one side where there is no difference. It is asked of two clocks, and after several
# numbers of rounds: in all 5 % to 6 % on each side if the clocks had nothing to do with each other.
ALPHA = 0.02
FEWEST_ROUNDS = 6  # the fewest that can tell: 6 of 6 have a chance of 1.6 %
MOST_ROUNDS = 25
_LOOKS = (FEWEST_ROUNDS, 9, 14, MOST_ROUNDS)  # rounds after which it is asked whether more are needed
# Of a difference that has not shown after some rounds, more seldom do by more rounds.
_HOPELESS, _HOPELESS_ROUNDS = 0.25, 9
# How large a difference is, is known where the error of its median is at most this part of it: few rounds of a busy
# machine tell that there is one long before.
_PRECISE = 0.25
SECONDS = 10.0  # for rounds beyond the fewest
# A shorter step is done again and again in its turn: other programs take the core for milliseconds at a time, which of
# a step of one is noise of several times its length.
SHORTEST_NS = 20_000_000  # of a turn, in processor time
_LONGEST_NS = 5 * SHORTEST_NS  # in wall time, for a step that waits more than it works


class Told(Enum):
    """What a sign test says."""

    LESS = "less"
    MORE = "more"
    NOTHING = "nothing"  # no difference that could be told from noise


@dataclass(frozen=True)
class Side:
    """One way to do the work."""

    wall_ns: int  # median
    spread_ns: int  # between the quartiles
    peak_bytes: int  # above the start


NOTHING = Side(0, 0, 0)


@dataclass
class Times:
    """Of one way, round by round."""

    wall_ns: list[int] = field(default_factory=list)
    busy_ns: list[int] = field(default_factory=list)  # of all threads of the process

    def side(self, peak_bytes: int) -> Side:
        """The way in three numbers."""
        return Side(int(statistics.median(self.wall_ns)), _spread(self.wall_ns), peak_bytes)


@dataclass(frozen=True)
class Way:
    """The work, and what is called before it to have it done this way."""

    switch: Callable[[], object]
    work: Callable[[], object]

    before: int = 0  # how often it is done ahead of being measured: until what compiles has compiled

    def settle(self) -> None:
        """Do it as often as it takes until it always does the same."""
        for _ in range(self.before):
            self.peak()

    def peak(self) -> None:
        """Do it."""
        self.switch()
        self.work()


def measured(
    ways: Sequence[Way],
    device: torch.device,
    *,
    pairs: Iterable[tuple[int, int]] = (),
    sized: tuple[int, int] | None = None,
    settled: bool = False,
    seconds: float = SECONDS,
) -> tuple[list[Times], list[int]]:
    """Measure the times and peaks in bytes of each way.

    Args:
        ways: all but the first are measured beside others in each round, there and back.
        device: where the work is done.
        pairs: of places in ``ways``, that are to be told apart: rounds go on until each is, or time is up.
        sized: one more pair, of which it is to be known how large the difference is.
        settled: see :func:`~gradscope.trace.memory.peak_bytes`.
        seconds: for rounds beyond the fewest.
    """
    peaks = _peaks(ways, device, settled=settled)
    times = [Times() for _ in ways]
    wanted = [*pairs, *([] if sized is None else [sized])]
    start = time.perf_counter()
    for number in range(1, MOST_ROUNDS + 1):
        places = range(len(ways)) if number % 2 else range(len(ways) - 1, -1, -1)
        for place in places:
            _time(ways[place], times[place], device)
        if number in _LOOKS:
            late = time.perf_counter() - start > seconds
            known = sized is None or _is_precise(times[sized[0]], times[sized[1]])
            if late or (known and all(_settled(times[one], times[other]) for one, other in wanted)):
                break
    return times, peaks


def _peaks(ways: Sequence[Way], device: torch.device, *, settled: bool) -> list[int]:
    for way in ways:
        way.settle()
    return peaks_bytes([way.peak for way in ways], device, settled=settled)


def _settled(before: Times, after: Times) -> bool:
    if told(before, after) is not Told.NOTHING:
        return True
    rounds = len(before.wall_ns)
    return rounds >= _HOPELESS_ROUNDS and min(_sides(before.wall_ns, after.wall_ns)) > _HOPELESS


def _is_precise(before: Times, after: Times) -> bool:
    """Return whether the size of a difference that can be told is known; by wall time, which is what is shown."""
    if told(before, after) is Told.NOTHING:
        return True
    apart = [new - old for old, new in zip(before.wall_ns, after.wall_ns, strict=True)]
    # The standard error of a median where values scatter normally: 1.25 sigma / sqrt(n); the quartiles lie 1.35 sigma
    # apart.
    error = 1.25 / 1.35 * _spread(apart) / math.sqrt(len(apart))
    return error <= _PRECISE * abs(statistics.median(apart))


def told(before: Times, after: Times) -> Told:
    """Return whether ``after`` takes less time than ``before``, or more."""
    by_wall = _sign_test(before.wall_ns, after.wall_ns)
    if by_wall is not Told.NOTHING:
        return by_wall
    by_work = _sign_test(before.busy_ns, after.busy_ns)
    middle = statistics.median(after.wall_ns) - statistics.median(before.wall_ns)
    against = middle > 0 if by_work is Told.LESS else middle < 0
    return Told.NOTHING if against else by_work


def _sign_test(before: Sequence[int], after: Sequence[int]) -> Told:
    middle = statistics.median(new - old for old, new in zip(before, after, strict=True))
    if abs(middle) <= LEAST * statistics.median(before):
        return Told.NOTHING
    less, more = _sides(before, after)
    if middle < 0 and less <= ALPHA:
        return Told.LESS
    return Told.MORE if middle > 0 and more <= ALPHA else Told.NOTHING


def _sides(before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
    """Return the chance of as many rounds in which ``after`` took less, and of as many in which it took more."""
    apart = [new - old for old, new in zip(before, after, strict=True)]
    less, more = sum(each < 0 for each in apart), sum(each > 0 for each in apart)
    return _chance(less, len(apart)), _chance(more, len(apart))


def _chance(successes: int, rounds: int) -> float:
    """Return the chance of at least as many heads of a fair coin."""
    return sum(math.comb(rounds, heads) for heads in range(successes, rounds + 1)) / 2**rounds


def _time(way: Way, found: Times, device: torch.device) -> None:
    way.switch()
    _wait(device)
    wall, busy, runs = time.perf_counter_ns(), time.process_time_ns(), 0
    while True:
        way.work()
        runs += 1
        if time.process_time_ns() - busy >= SHORTEST_NS or time.perf_counter_ns() - wall >= _LONGEST_NS:
            break
    _wait(device)
    found.wall_ns.append((time.perf_counter_ns() - wall) // runs)
    # What the processor does for a device says nothing of the device's time.
    found.busy_ns.append((time.process_time_ns() - busy) // runs if device.type == "cpu" else found.wall_ns[-1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(times: Sequence[int]) -> int:
    if len(times) < 2:
        return 0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return int(high - low)


# A peak that differs by less is the same: masks and numbers of one call.
LEAST_BYTES = 0.01
_FEW_BYTES = 16 << 10

SLOWER = "the step is slower with it"
NO_GAIN = "neither time nor memory improves beyond noise"
HUNGRIER = "the step needs more memory with it"
NOT_TOGETHER = "it brings no improvement in combination with the others"

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
        """Return why groups are worse than none, or no better; ``shown`` are known to make the step faster."""
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
        """Return the groups without which the step needs no more memory: some save only behind others."""
        if not idle:
            return []
        without = [self._way([group for group in self._groups if group != each]) for each in idle]
        peaks = _peaks(without, self._device, settled=True)
        return [group for group, peak in zip(idle, peaks, strict=True) if not self._much(peak - self._peaks[-1])]

    def weakest(self) -> dict[Group, str]:
        """Return the group that saves the least time."""
        return {min(self._groups, key=lambda group: self.saved[group].ns): NOT_TOGETHER}

    def _much(self, more: int) -> bool:
        return much(more, self._peaks[0])


def much(more: int, peak: int) -> bool:
    """Return whether so many bytes are more than noise in a step of that peak."""
    return more > max(LEAST_BYTES * peak, _FEW_BYTES)


def _changes(times: Sequence[Times]) -> list[Told]:
    return list(itertools.starmap(told, itertools.pairwise(times)))
