"""Device time: every kernel belongs to the layer of the op that launched it.

While the device works, a nanosecond belongs to the kernel's layer; while it idles, to whatever the CPU was doing, for
that is what the device waited for. So the parts still add up to the wall time of a step that ends with a
synchronisation, and launch-bound layers show as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope import ops
from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.rows import BACKWARD_CATEGORIES, BoolColumn, Category, Steps
from gradscope.tables import BEFORE_THE_TRACE, EventTable, IntColumn, KernelTable


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """The timeline of the device beside the CPU's rows."""

    start_ns: IntColumn  # of each CPU row, on a clock that stands still while the device works
    end_ns: IntColumn
    row: IntColumn  # of each kernel: the CPU row that launched it; -1 where it is not known
    busy_ns: IntColumn  # of each kernel: its share of the time during which a device worked
    duration_ns: IntColumn  # of each kernel, overlaps counted in each
    communicates: BoolColumn  # whether each is a collective between ranks
    exposed_ns: IntColumn  # of each collective: in which its device did nothing else; 0 of others
    covered: Stretches  # of time, in which what has a launcher runs: the CPU's clock stands still
    works: Stretches  # of time, in which anything runs, also kernels of unknown launch

    def idle_ns(self, steps: Steps) -> IntColumn:
        """How long the device did nothing while the host was in each step."""
        return steps.wall_ns - (self.works.until(steps.end_ns) - self.works.until(steps.start_ns))

    def steps_ns(self, steps: Steps) -> IntColumn:
        """How much of the time belongs to each step: what the host did meanwhile, and what the step's kernels took.

        The host's part is what the device idled in the step, or ran of unknown launch. Where each step waits for the
        device the sum is its wall time. Where the host runs ahead, its steps are short and the kernels run later: this
        is what they take of the timeline, which they share without overlap.
        """
        found = steps.wall_ns - (self.covered.until(steps.end_ns) - self.covered.until(steps.start_ns))
        known = self.row >= 0
        number = steps.of_row[self.row[known]]
        inside = number >= 0
        np.add.at(found, number[inside], self.busy_ns[known][inside])
        return found


def read_device(table: EventTable, kernels: KernelTable) -> DeviceTime:
    """Lay the kernels beside the CPU rows.

    Where several run at the same time, on whatever stream, a nanosecond belongs to one that computes, else to a copy,
    else to communication: a collective or a prefetch that overlaps compute costs nothing, and the part of it that is
    left is exposed. Among equals of one device it belongs to the one that started first; several devices share it. The
    time of a kernel that nobody is known to have launched stays with the CPU, as if the device had idled; of one
    launched before the trace it is gone. The device works in both, and both hide communication: neither counts as idle.
    """
    row, start = kernels.row, kernels.start_ns
    end = np.where((row >= 0) | (row == BEFORE_THE_TRACE), kernels.end_ns, start)
    kind = kinds_of(kernels.names)[kernels.name]
    busy, covered = _busy(start, end, kind, kernels.device)
    exposed = np.zeros(len(row), np.int64)
    for one in np.unique(kernels.device):  # compute of another device hides nothing
        mine = np.flatnonzero(kernels.device == one)
        alone, _ = _busy(start[mine], kernels.end_ns[mine], kind[mine], kernels.device[mine])
        exposed[mine] = np.where(kind[mine] == _COMMUNICATION, alone, 0)
    return DeviceTime(
        table.start_ns - covered.until(table.start_ns),
        table.end_ns - covered.until(table.end_ns),
        row,
        busy,
        kernels.end_ns - kernels.start_ns,
        kind == _COMMUNICATION,
        exposed,
        covered,
        Stretches.union(start, kernels.end_ns),
    )


def _busy(start: IntColumn, end: IntColumn, kind: IntColumn, device: IntColumn) -> tuple[IntColumn, Stretches]:
    """What each kernel has of the time in which any works, and that time."""
    busy = np.zeros(len(start), np.int64)
    covered = Stretches.none()
    for each in range(_COMMUNICATION + 1):
        first, last = start.copy(), end.copy()
        of_kind = np.flatnonzero(kind == each)
        for one in np.unique(device[of_kind]):
            mine = of_kind[device[of_kind] == one]
            first[mine], last[mine] = _without_overlap(start[mine], end[mine])
        first, last = first[of_kind], last[of_kind]
        # On a clock that stands still while something runs that comes before these.
        busy[of_kind] = _shared(first - covered.until(first), last - covered.until(last), device[of_kind])
        covered = Stretches.union(np.concatenate([covered.first, first]), np.concatenate([covered.last, last]))
    return busy, covered


def _shared(first: IntColumn, last: IntColumn, device: IntColumn) -> IntColumn:
    """How long each stretch is, where stretches of one device do not overlap and several devices share what is left.

    All shares add up to the time that any stretch covers.
    """
    devices = np.unique(device)
    if len(devices) < 2:
        return last - first
    cuts = np.unique(np.concatenate([first, last]))
    length = np.diff(cuts)
    works = np.zeros((len(devices), len(length)), bool)
    for place, one in enumerate(devices):
        mine = device == one
        change = np.zeros(len(cuts), np.int64)
        np.add.at(change, np.searchsorted(cuts, first[mine]), 1)
        np.add.at(change, np.searchsorted(cuts, last[mine]), -1)
        works[place] = np.cumsum(change)[:-1] > 0
    several = np.maximum(works.sum(axis=0), 1)
    found = np.zeros(len(first), np.int64)
    for place, one in enumerate(devices):
        mine = np.flatnonzero(device == one)
        turn = np.cumsum(works, axis=0)[place] - 1  # of those that work: the first have a nanosecond that is left over
        share = np.where(works[place], length // several + (turn < length % several), 0)
        until = np.concatenate([[0], np.cumsum(share)])
        found[mine] = until[np.searchsorted(cuts, last[mine])] - until[np.searchsorted(cuts, first[mine])]
    return found


_COMPUTE, _COPY, _COMMUNICATION = range(3)  # in order of priority
_COPIES = re.compile(r"^(?:gpu_)?mem(?:cpy|set)|^copy(?:host|device)|^(?:copy|fill)buffer", re.IGNORECASE)


def kinds_of(names: Sequence[str]) -> IntColumn:
    """What each name of a device activity does: compute, copy or communicate."""
    found = [
        _COMMUNICATION if ops.COLLECTIVE_KERNEL.search(name) else _COPY if _COPIES.search(name) else _COMPUTE
        for name in names
    ]
    return np.array(found, np.int64)


def _without_overlap(start: IntColumn, end: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Begin and end of each stretch, in order of start, without what an earlier one covers."""
    if len(start) == 0:
        return start, end
    covered = np.maximum.accumulate(np.concatenate([start[:1], end]))[:-1]
    first = np.maximum(start, covered)
    return first, np.maximum(end, first)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of time that do not overlap, in order.

    Attributes:
        first, last: begin and end of each, ns.
        before: what all stretches before it add up to, and behind the last one the sum of all.
    """

    first: IntColumn
    last: IntColumn
    before: IntColumn

    @classmethod
    def none(cls) -> Stretches:
        """No stretch."""
        return cls.union(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def union(cls, first: IntColumn, last: IntColumn) -> Stretches:
        """What any of these covers."""
        order = np.argsort(first, kind="stable")
        first, last = _without_overlap(first[order], last[order])
        some = last > first
        first, last = first[some], last[some]
        return cls(first, last, np.concatenate([[0], np.cumsum(last - first)]))

    def until(self, time: IntColumn) -> IntColumn:
        """How much of the time until each of these moments is covered."""
        if len(self.first) == 0:
            return np.zeros(len(time), np.int64)
        place = np.searchsorted(self.first, time, side="right")
        left = np.where(place > 0, np.maximum(self.last[place - 1] - time, 0), 0)
        covered: IntColumn = self.before[place] - left
        return covered


def kernel_contributions(device: DeviceTime, op: IntColumn, assigned: Assigned) -> list[Contribution]:
    """Each kernel's time, charged to the row that launched it and under the name of its op.

    A collective's is communication for the layer of that row, whatever the row is called: libraries have operations of
    their own that launch one.

    Args:
        op: what each row is called, as in :func:`~gradscope.attribute.cost_table.own_contribution`.
    """
    known = device.row >= 0
    collective = known & device.communicates
    category = assigned.rows.category[np.maximum(device.row, 0)]
    in_backward = collective & np.isin(category, BACKWARD_CATEGORIES) & (category != Category.COMMUNICATION)

    def part(mask: BoolColumn) -> Contribution:
        kernel = np.flatnonzero(mask)
        launcher = device.row[kernel]
        calls = np.zeros(len(kernel), np.int64)
        return Contribution(launcher, op[launcher], device.busy_ns[kernel], calls, kernel=kernel)

    layer = assigned.rows.owner[device.row[in_backward]]
    elsewhere = collective & ~np.isin(category, BACKWARD_CATEGORIES)
    return [
        part(known & ~in_backward & ~elsewhere),
        replace(part(in_backward), apart=Category.COMMUNICATION, layer=layer),
        replace(part(elsewhere), communicates=True),
    ]


def duration_contributions(device: DeviceTime, op: IntColumn) -> Contribution:
    """How long each kernel ran, one call each, as :func:`kernel_contributions` gives its share of the time."""
    kernel = np.flatnonzero(device.row >= 0)
    launcher = device.row[kernel]
    ones = np.ones(len(kernel), np.int64)
    return Contribution(launcher, op[launcher], device.duration_ns[kernel], ones, kernel=kernel)


def overlapped(device: DeviceTime, op: IntColumn) -> Contribution:
    """What of each collective its device did something else in, as :func:`kernel_contributions` gives kernels' time."""
    known = (device.row >= 0) & device.communicates
    launcher = device.row[known]
    hidden = device.duration_ns[known] - device.exposed_ns[known]
    return Contribution(launcher, op[launcher], hidden, np.zeros(len(launcher), np.int64))
