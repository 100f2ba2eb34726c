"""Which of a few steps the system interrupted: they took longer, but did not work longer.

A step that has more to do, a longer sequence say, takes more processor time in the same proportion. One that waited for
a core, for the disk or for another process does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LONGER = 1.25  # times the median: less is within what steps of one loop differ by on a quiet machine
_LEAST_NS = 200_000  # less is no interruption that matters: a wake-up of the scheduler takes some 50 µs
# Of the processor time that an undisturbed step takes for each ns of wall time. Two threads of which one waits for the
# other, which was stopped, still take half of it: spinning.
_WORKED = 0.75


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step, in ns."""

    wall_ns: int
    processor_ns: int  # of all threads of the process


def interrupted(steps: Sequence[StepCost]) -> list[int]:
    """Indices of the steps that were interrupted, judged against the median of all; none of fewer than three."""
    if len(steps) < 3:
        return []
    wall = statistics.median(step.wall_ns for step in steps)
    processor = statistics.median(step.processor_ns for step in steps)
    if not wall:
        return []
    found = []
    for number, step in enumerate(steps):
        longer = step.wall_ns - wall
        if longer <= max((_LONGER - 1) * wall, _LEAST_NS):
            continue
        if (step.processor_ns - processor) / longer < _WORKED * processor / wall:
            found.append(number)
    return found
