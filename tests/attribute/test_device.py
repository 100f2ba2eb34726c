"""Device time on hand-made timelines: who owns a nanosecond while the device works, and who while it idles."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.attribute.device import read_device
from gradscope.attribute.rows import self_times
from gradscope.tables import EventTable, KernelTable, RowKind


def _table(rows: list[tuple[int, int, int]]) -> EventTable:
    """CPU rows of (start, end, parent)."""
    start, end, parent = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    count = len(rows)
    return EventTable(
        names=("op",),
        name=np.zeros(count, np.int32),
        kind=np.full(count, RowKind.OP, np.int8),
        argument=np.full(count, -1),
        start_ns=start,
        end_ns=end,
        thread=np.ones(count, np.int32),
        sequence=np.full(count, -1),
        forward_thread=np.zeros(count, np.int32),
        parent=parent.astype(np.int32),
        depth=(parent >= 0).astype(np.int32),
    )


def _kernels(rows: list[tuple[int, int, int]]) -> KernelTable:
    """Kernels of (start, end, row that launched it)."""
    start, end, row = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int64)
    return KernelTable(("k",), zeros, start, end, zeros, zeros, row)


def test_work_belongs_to_the_kernel_and_idling_to_the_cpu() -> None:
    # One pass of 100 ns that launches twice; the kernels run at 20-50 and 60-90.
    table = _table([(0, 100, -1), (10, 30, 0), (40, 55, 0)])
    device = read_device(table, _kernels([(20, 50, 1), (60, 90, 2)]))
    own = self_times(table, device.start_ns, device.end_ns)
    assert device.row.tolist() == [1, 2]
    assert device.busy_ns.tolist() == [30, 30]
    # Idle: 0-10 and 55-60, 90-100 under the pass itself, 10-20 under the first op, 50-55 under the second.
    assert own.tolist() == [25, 10, 5]
    assert own.sum() + device.busy_ns.sum() == 100


def test_overlapping_kernels_are_counted_once_and_their_durations_in_full() -> None:
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0)])
    device = read_device(table, _kernels([(10, 60, 1), (30, 50, 2), (55, 80, 2)]))
    assert device.busy_ns.tolist() == [50, 0, 20]
    assert device.duration_ns.tolist() == [50, 20, 25]
    own = self_times(table, device.start_ns, device.end_ns)
    assert own.sum() + device.busy_ns.sum() == 100


def test_a_kernel_nobody_is_known_to_have_launched_leaves_its_time_with_the_cpu() -> None:
    table = _table([(0, 100, -1)])
    device = read_device(table, _kernels([(10, 20, -1)]))
    assert (device.row.tolist(), device.busy_ns.tolist()) == ([-1], [0])
    assert self_times(table, device.start_ns, device.end_ns).tolist() == [100]


@pytest.mark.parametrize("seed", range(20))
def test_busy_and_idle_make_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, 999), 20, replace=False))
    table = _table([(0, 1000, -1), *((int(a), int(b), 0) for a, b in zip(cuts[::2], cuts[1::2], strict=True))])
    starts = np.sort(rng.integers(0, 900, 15))
    kernels = [(int(start), int(start + rng.integers(1, 100)), int(rng.integers(-1, 11))) for start in starts]
    device = read_device(table, _kernels(kernels))
    own = self_times(table, device.start_ns, device.end_ns)
    assert (own >= 0).all()
    assert own.sum() + device.busy_ns.sum() == 1000
