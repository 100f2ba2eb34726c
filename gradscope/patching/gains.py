"""What a replacement saves: time and memory of the same work with it and without it, in turns."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradscope.trace.peak import peaks_bytes

# A replacement is slower where its median is above the original's by more than this share and by more than the
# distance between the quartiles of both.
NOISE = 0.02

# More memory than this above the original's counts as hungrier; below it lie the masks and numbers of one call.
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Side:
    """One way to do the work."""

    wall_ns: int  # median
    spread_ns: int  # between the quartiles
    peak_bytes: int  # above the start


NOTHING = Side(0, 0, 0)


@dataclass(frozen=True)
class Gain:
    """Both ways."""

    before: Side
    after: Side

    @property
    def saved_ns(self) -> int:
        """Time saved a step; negative where it is lost."""
        return self.before.wall_ns - self.after.wall_ns

    @property
    def saved_bytes(self) -> int:
        """Peak memory saved; negative where it is lost."""
        return self.before.peak_bytes - self.after.peak_bytes

    @property
    def slower(self) -> bool:
        """Whether time is lost beyond noise."""
        noise = max(NOISE * self.before.wall_ns, self.before.spread_ns, self.after.spread_ns)
        return -self.saved_ns > noise

    def hungrier(self, whole_bytes: int = 0) -> bool:
        """Whether the peak is higher, beyond a megabyte and noise: of the work, or of the whole step it is a part of.

        Args:
            whole_bytes: peak of the whole step.
        """
        return -self.saved_bytes > max(SLACK_BYTES, NOISE * max(self.before.peak_bytes, whole_bytes))


def compare_work(
    before: Callable[[], object],
    after: Callable[[], object],
    switch: Callable[[bool], None],
    device: torch.device,
    rounds: int = 5,
) -> Gain:
    """Time and memory of two ways, in turns, so that a machine that slows down slows both.

    Args:
        before, after: the same work in both ways.
        switch: called with True before ``after`` and with False before ``before``.
        device: where the work is done.
        rounds: of time; memory is measured once each.
    """
    work = {False: before, True: after}
    old, new = sides_of(
        [(work[put], functools.partial(switch, put)) for put in (False, True)], device, rounds, settled=False
    )
    return Gain(old, new)


def sides_of(
    ways: Sequence[tuple[Callable[[], object], Callable[[], None]]],
    device: torch.device,
    rounds: int,
    *,
    settled: bool,
    first_peak: int | None = None,
) -> list[Side]:
    """Time and memory of each way, a pair of work and what is called before it.

    Args:
        ways: the same work in different ways.
        device: where the work is done.
        rounds: of time, all ways in turns.
        settled: see :func:`~gradscope.trace.peak.peak_bytes`.
        first_peak: of the first way, where it is known.
    """
    known = [] if first_peak is None else [first_peak]
    works = [functools.partial(_switched, *way) for way in ways[len(known) :]]
    peaks = [*known, *peaks_bytes(works, device, settled=settled)]
    times: list[list[int]] = [[] for _ in ways]
    for _ in range(rounds):
        for found, (work, switch) in zip(times, ways, strict=True):
            switch()
            found.append(_timed(work, device))
    return [Side(int(statistics.median(found)), _spread(found), peak) for found, peak in zip(times, peaks, strict=True)]


def _switched(work: Callable[[], object], switch: Callable[[], None]) -> None:
    switch()
    work()


def _timed(work: Callable[[], object], device: torch.device) -> int:
    _wait(device)
    start = time.perf_counter_ns()
    work()
    _wait(device)
    return time.perf_counter_ns() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(times: list[int]) -> int:
    if len(times) < 2:
        return 0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return int(high - low)
