"""What the system does while steps run: which steps it or a compilation interrupted, and the pages that it hands out.

A step that has more to do, a longer sequence say, takes more processor time in the same proportion. One that waited for
a core, for the disk or for another process does not.

On a machine that is busy all the time most steps wait, and the median of all of them says nothing. Linux tells how long
a thread was ready to run and had no core: steps that had theirs are what the others are judged against, and where there
are none of them the report says how much of its time was such waiting.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LONGER = 1.25  # times the median: less is within what steps of one loop differ by on a quiet machine
_LEAST_NS = 200_000  # less is no interruption that matters: a wake-up of the scheduler takes some 50 µs
# Of the processor time that an undisturbed step takes for each ns of wall time. Two threads of which one waits for the
# other, which was stopped, still take half of it: spinning.
_WORKED = 0.75
# Of a step's time, that its thread had no core: with less it is one to judge the others against.
_CALM = 0.10
_LEAST_CALM = 2  # one alone may be the odd one

_SCHEDULER = "/proc/thread-self/schedstat"  # time on a core, time ready and without one, both in ns; times it got one


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step, in ns."""

    wall_ns: int
    processor_ns: int  # of all threads of the process
    waited_ns: int = 0  # that the training thread was ready to run and had no core
    compiled: bool = False  # torch.compile compiled something in it, or it began behind that with a look at all modules


def without_core_ns() -> int | None:
    """Return how long the calling thread was ready to run but had no core, in ns; None where nobody tells."""
    try:
        with open(_SCHEDULER, "rb", buffering=0) as file:
            return int(file.read(128).split()[1])
    except (OSError, ValueError, IndexError):
        return None


def compiling(steps: Sequence[StepCost]) -> list[int]:
    """Indices of the steps in which torch.compile compiled, as in an epoch's first evaluation.

    None where it compiles in most of them: then that is what the program's steps are.
    """
    found = [number for number, step in enumerate(steps) if step.compiled]
    return found if 2 * len(found) <= len(steps) else []


def interrupted(steps: Sequence[StepCost]) -> list[int]:
    """Indices of the steps that were interrupted; none of fewer than three.

    They are judged against the median of those that had a core all the time, of all where hardly any had.

    Args:
        steps: without those that are left out because they compiled.
    """
    if len(steps) < 3:
        return []
    calm = [step for step in steps if step.waited_ns <= _CALM * step.wall_ns]
    known = calm if len(calm) >= _LEAST_CALM else steps
    wall = statistics.median(step.wall_ns for step in known)
    processor = statistics.median(step.processor_ns for step in known)
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


if sys.platform != "win32":
    import resource


# Settings of glibc's allocator that keep freed memory, and allocators that replace it.
_KEEPING = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


class FaultMeter:
    """Notes what the process's threads asked of the system between :meth:`start` and :meth:`stop`, of each step."""

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None
        self._steps: list[tuple[int, float]] = []

    def start(self) -> None:
        """A step begins."""
        self._began = _usage()

    def stop(self) -> None:
        """It has ended."""
        now = _usage()
        if self._began is not None and now is not None:
            self._steps.append((now[0] - self._began[0], now[1] - self._began[1]))
        self._began = None

    def facts(self) -> dict[str, Any]:
        """``page_faults`` (minor ones) and ``system_ns`` of the step that had the fewest; empty: nothing was measured.

        The fewest, for at first the heap grows. The time is that of all threads together. ``kept``: whether the
        environment asks for an allocator that keeps freed memory.
        """
        if not self._steps:
            return {}
        faults, system = min(self._steps)
        preloaded = os.environ.get("LD_PRELOAD", "")
        kept = any(name in os.environ for name in _KEEPING) or any(name in preloaded for name in _ALLOCATORS)
        return {"page_faults": faults, "system_ns": round(system * 1e9), "kept": kept}


def _usage() -> tuple[int, float] | None:
    if sys.platform == "win32":
        return None
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_minflt, found.ru_stime
