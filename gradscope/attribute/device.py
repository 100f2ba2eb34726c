"""Device time: every kernel belongs to the layer of the op that launched it. Not yet run on a GPU.

While the device works, a nanosecond belongs to the kernel's layer; while it idles, to whatever the CPU was doing, for
that is what the device waited for. So the parts still add up to the wall time of a pass that ends with a
synchronisation, and launch-bound layers show as such.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope.attribute.cost_table import Contribution
from gradscope.tables import EventTable, IntColumn, KernelTable


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """The timeline of the device beside the CPU's rows."""

    start_ns: IntColumn  # of each CPU row, on a clock that stands still while the device works
    end_ns: IntColumn
    row: IntColumn  # of each kernel: the CPU row that launched it; -1 where it is not known
    busy_ns: IntColumn  # of each kernel: its share of the time during which the device worked
    duration_ns: IntColumn  # of each kernel, overlaps counted in each


def read_device(table: EventTable, kernels: KernelTable) -> DeviceTime:
    """Lay the kernels beside the CPU rows.

    The time of a kernel that nobody is known to have launched stays with the CPU, as if the device had idled.
    """
    row, start = kernels.row, kernels.start_ns
    end = np.where(row >= 0, kernels.end_ns, start)
    # Kernels come by start: what an earlier one covers is not counted again for a later one.
    covered = np.maximum.accumulate(np.concatenate([start[:1], end]))[:-1]
    first = np.maximum(start, covered)
    last = np.maximum(end, first)
    busy = last - first

    def idle_clock(time: IntColumn) -> IntColumn:
        before = np.concatenate([[0], np.cumsum(busy)])
        place = np.searchsorted(first, time, side="right")
        spent = before[place]
        current = place - 1
        inside = (current >= 0) & (time < last[current])
        spent = spent - np.where(inside, last[current] - time, 0)
        return time - spent

    return DeviceTime(
        idle_clock(table.start_ns), idle_clock(table.end_ns), row, busy, kernels.end_ns - kernels.start_ns
    )


def kernel_contribution(device: DeviceTime, op: IntColumn) -> Contribution:
    """Each kernel's time, charged to the row that launched it and under the name of its op.

    Args:
        op: what each row is called, as in :func:`~gradscope.attribute.cost_table.own_contribution`.
    """
    known = device.row >= 0
    launcher = device.row[known]
    return Contribution(launcher, op[launcher], device.busy_ns[known], np.zeros(len(launcher), np.int64))
