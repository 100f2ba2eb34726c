"""Device time on hand-made timelines: who owns a nanosecond while the device works, and who while it idles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradscope.attribute.device import kinds_of, overlapped, read_device
from gradscope.attribute.rows import Steps, self_times
from gradscope.tables import BEFORE_THE_TRACE, EventTable, KernelTable, RowKind


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


NAMES = ("gemm", "Memcpy HtoD (Pinned -> Device)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
GEMM, COPY, ALL_REDUCE = range(3)


def _kernels(rows: list[tuple[int, ...]]) -> KernelTable:
    """Kernels of (start, end, row that launched it, index in ``NAMES``, device), the last two 0 where left out."""
    rows = sorted((*row, *(0,) * (5 - len(row))) for row in rows)
    start, end, row, name, device = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return KernelTable(NAMES, name, start, end, device, np.zeros(len(rows), np.int64), row)


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


def test_a_device_that_runs_what_nobody_is_known_to_have_launched_is_not_idle() -> None:
    """It hides a collective as other kernels do; of the wall its time stays with the CPU."""
    table = _table([(0, 100, -1), (0, 5, 0)])
    device = read_device(table, _kernels([(10, 60, 1, ALL_REDUCE), (20, 40, -1, GEMM), (70, 80, -1, GEMM)]))
    steps = Steps(np.array([0]), np.array([100]), np.zeros(2, np.int64))
    assert device.idle_ns(steps).tolist() == [100 - 50 - 10]
    assert device.exposed_ns.tolist() == [50 - 20, 0, 0]
    assert device.busy_ns.tolist() == [50, 0, 0] and device.steps_ns(steps).tolist() == [100]
    assert self_times(table, device.start_ns, device.end_ns).tolist() == [45, 5]


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


def test_communication_that_overlaps_compute_costs_nothing() -> None:
    """A collective starts first and ends last: what compute leaves of it is exposed."""
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0), (10, 12, 0)])
    device = read_device(table, _kernels([(10, 90, 1, ALL_REDUCE), (20, 50, 2, GEMM), (60, 80, 3, GEMM)]))
    assert device.busy_ns.tolist() == [80 - 30 - 20, 30, 20]
    assert device.duration_ns.tolist() == [80, 30, 20]
    assert self_times(table, device.start_ns, device.end_ns).sum() + device.busy_ns.sum() == 100


def test_a_prefetch_under_a_matmul_costs_nothing_and_a_copy_hides_communication() -> None:
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0), (10, 12, 0)])
    kernels = [(10, 40, 1, COPY), (15, 35, 2, GEMM), (30, 60, 3, ALL_REDUCE)]
    device = read_device(table, _kernels(kernels))
    assert device.busy_ns.tolist() == [10, 20, 20]


def test_two_devices_at_the_same_time_are_one_stretch_of_the_wall() -> None:
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0)])
    device = read_device(table, _kernels([(10, 60, 1, GEMM, 0), (40, 90, 2, GEMM, 1)]))
    assert device.busy_ns.tolist() == [40, 40]  # they share 40 to 60
    assert device.duration_ns.tolist() == [50, 50]


def test_compute_of_another_device_hides_no_communication() -> None:
    """It takes none of the wall, and its own device waits all the same."""
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0)])
    device = read_device(table, _kernels([(10, 60, 1, GEMM, 0), (20, 70, 2, ALL_REDUCE, 1), (50, 65, 2, GEMM, 1)]))
    # 50 to 60 is shared: five of each.
    assert device.busy_ns.tolist() == [40 + 5, 5, 5 + 5]
    assert device.exposed_ns.tolist() == [0, 30 + 5, 0]


def test_a_nanosecond_that_cannot_be_shared_is_somebodys() -> None:
    table = _table([(0, 100, -1), (0, 5, 0)])
    device = read_device(table, _kernels([(10, 17, 1, GEMM, 0), (10, 17, 1, GEMM, 1), (10, 17, 1, GEMM, 2)]))
    assert device.busy_ns.tolist() == [3, 2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_every_nanosecond_has_the_owner_that_a_walk_finds(seed: int) -> None:
    """Beside the sweep, each nanosecond by itself: compute, then copies, then communication; the first that started.

    Several devices share it.
    """
    rng = np.random.default_rng(seed)
    table = _table([(0, 300, -1), (1, 2, 0), (3, 4, 0)])
    starts = np.sort(rng.choice(np.arange(280), 25, replace=False))
    kernels = _kernels(
        [
            (int(one), int(one + rng.integers(0, 60)), int(rng.integers(-1, 3)), int(rng.integers(0, 3)), int(device))
            for one, device in zip(starts, rng.integers(0, 1 + seed % 3, len(starts)), strict=True)
        ]
    )
    device = read_device(table, kernels)
    owned, exposed, idle = np.zeros(len(starts)), np.zeros(len(starts), np.int64), 0

    def first_of_each(runs: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[int, int]:
        """Of each device the kernel that a moment belongs to, of those that run."""
        return {
            one: min(
                np.flatnonzero(runs & (kernels.device == one)).tolist(),
                key=lambda k: (kernels.name[k], kernels.start_ns[k]),
            )
            for one in np.unique(kernels.device[runs]).tolist()
        }

    for moment in range(400):
        runs = (kernels.start_ns <= moment) & (kernels.end_ns > moment)
        idle += moment < 300 and not runs.any()
        # Whoever launched it, the device works.
        for kernel in first_of_each(runs).values():
            exposed[kernel] += kernels.name[kernel] == ALL_REDUCE
        first = first_of_each(runs & (kernels.row >= 0))
        if not first:
            continue
        best = min(kernels.name[kernel] for kernel in first.values())
        sharing = [kernel for kernel in first.values() if kernels.name[kernel] == best]
        owned[sharing] += 1 / len(sharing)
    # A share is rounded where what works changes, at most at each beginning and end.
    assert np.abs(device.busy_ns - owned).max() <= (0 if seed % 3 == 0 else 2 * len(starts))
    assert device.busy_ns.sum() == round(owned.sum())
    assert device.exposed_ns.tolist() == exposed.tolist()
    # The clock of the CPU's rows stands still for what any of them covers.
    own = self_times(table, device.start_ns, device.end_ns)
    inside = sum(
        any(kernels.start_ns[k] <= moment < kernels.end_ns[k] for k in np.flatnonzero(kernels.row >= 0))
        for moment in range(300)
    )
    assert own.sum() == 300 - inside
    # The whole table is one step of 300: what the host did in it, and what its kernels took.
    steps = Steps(np.array([0]), np.array([300]), np.zeros(len(table), np.int64))
    assert device.idle_ns(steps).tolist() == [idle]
    assert device.steps_ns(steps).tolist() == [own.sum() + device.busy_ns.sum()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "compute"),
        ("ampere_sgemm_128x64_tn", "compute"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16", "compute"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("reduce_scatter_tensor", "communication"),
        ("all_to_all_single", "communication"),
        ("AllGather", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("CopyHostToDevice", "copy"),
        ("void reduce_kernel<512, 1>", "compute"),
    ],
)
def test_what_a_device_activity_does_is_told_by_its_name(name: str, kind: str) -> None:
    assert ("compute", "copy", "communication")[int(kinds_of([name])[0])] == kind


def test_a_kernel_launched_before_the_trace_takes_its_time_from_the_cpu() -> None:
    """The device worked meanwhile, for nobody who is in the trace."""
    table = _table([(0, 100, -1)])
    device = read_device(table, _kernels([(10, 25, BEFORE_THE_TRACE), (20, 40, 0)]))
    assert self_times(table, device.start_ns, device.end_ns).tolist() == [70]
    assert device.busy_ns[device.row >= 0].tolist() == [15]


@pytest.mark.parametrize("seed", range(10))
def test_a_step_idles_where_no_kernel_runs(seed: int) -> None:
    """Wherever the kernels were launched; and what each step is charged adds up to the time of all."""
    rng = np.random.default_rng(seed)
    bounds = np.array([0, *np.sort(rng.choice(np.arange(1, 400), 3, replace=False)), 400])
    rows = [(int(first), int(last), -1) for first, last in itertools.pairwise(bounds)]
    table = _table(rows)
    starts = np.sort(rng.integers(0, 380, 12))
    kernels = _kernels([(int(one), int(one + rng.integers(1, 20)), int(rng.integers(0, 4))) for one in starts])
    device = read_device(table, kernels)
    steps = Steps(bounds[:-1], bounds[1:], np.arange(4))
    moments = np.arange(400)
    works = ((kernels.start_ns[:, None] <= moments) & (moments < kernels.end_ns[:, None])).any(axis=0)
    assert device.idle_ns(steps).tolist() == [int((~works[first:last]).sum()) for first, last, _ in rows]
    assert int(device.steps_ns(steps).sum()) == 400


@pytest.mark.parametrize(("other", "hidden"), [(0, 30), (1, 0)])
def test_what_is_hidden_of_a_collective_is_hidden_by_its_own_device(other: int, hidden: int) -> None:
    """Each has it on the row that launched it; kernels that compute have none."""
    table = _table([(0, 100, -1), (0, 5, 0), (5, 10, 0)])
    device = read_device(table, _kernels([(10, 60, 1, ALL_REDUCE, 0), (20, 50, 2, GEMM, other)]))
    found = overlapped(device, np.array([7, 8, 9]))
    assert (found.row.tolist(), found.op.tolist(), found.ns.tolist()) == ([1], [8], [hidden])


@pytest.mark.parametrize("seed", range(20))
def test_streams_of_a_device_are_one_timeline(seed: int) -> None:
    """Whose a nanosecond is does not hang on the streams that the kernels are in, collectives among them."""
    rng = np.random.default_rng(seed)
    table = _table([(0, 300, -1), (1, 2, 0), (3, 4, 0)])
    kernels = _kernels(
        [
            (int(one), int(one + rng.integers(1, 60)), 1, int(rng.choice([GEMM, ALL_REDUCE, ALL_REDUCE])), int(place))
            for one, place in zip(rng.choice(np.arange(280), 20, replace=False), rng.integers(0, 2, 20), strict=True)
        ]
    )
    alone, several = (
        read_device(table, replace(kernels, stream=streams))
        for streams in (kernels.stream, rng.integers(0, 4, len(kernels.stream)))
    )
    for what in ("busy_ns", "exposed_ns", "start_ns", "end_ns"):
        assert getattr(alone, what).tolist() == getattr(several, what).tolist()
