"""Communication over several steps: numbers are means of those that count, whatever the others do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.tables import KernelTable, LayerRow, ModuleInfo, ReducerInfo, RowKind

from .hand import Row, spans, table_of

US = 1_000
STEP_US = 2_000
PATHS = ("", "a", "b", "c")
MODULES = tuple(ModuleInfo(path, "Layer", None if not path else "", 0, None) for path in PATHS)
REDUCER = ReducerInfo("", 32, False, (((3, 30), (2, 10)), ((1, 20),)))
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
KERNELS = ("ncclDevKernel_AllReduce_Sum_f32", "gemm")


def _step(number: int, at: int, length: int) -> list[Row]:
    """A step of DDP that waits in forward, behind it, and for two buckets; ``length`` times as long as others.

    A length below zero: as long, and no gradient is reduced, as in ``no_sync()``.
    """
    synced, length = length > 0, abs(length)

    def row(kind: RowKind, start: int, end: int, name: str, thread: int = 1, argument: int = -1, node: int = -1) -> Row:
        first, last = ((at + length * time) * US for time in (start, end))
        sequence = 10 * number + node if node >= 0 else -1
        return Row(kind, first, last, name, thread, argument, sequence, forward_thread=1 if node >= 0 else 0)

    calls = [(0, 600), (10, 200), (210, 400), (410, 590)]
    rows = [
        row(RowKind.STEP, 0, 0, "step", argument=number),
        *(row(RowKind.CALL, *times, "call", argument=4 * number + place) for place, times in enumerate(calls)),
        row(RowKind.COMMUNICATION, 20, 30, "c10d::broadcast_"),
        row(RowKind.COMMUNICATION, 25, 150, "gloo:broadcast", 2),
        row(RowKind.OP, 155, 190, "aten::mm"),
        row(RowKind.COMMUNICATION, 610, 620, "c10d::barrier"),
        row(RowKind.COMMUNICATION, 615, 700, "gloo:barrier", 2),
        row(RowKind.OP, 705, 710, "aten::item"),
        row(RowKind.BACKWARD, 720, 1900, "backward", argument=number),
        row(RowKind.NODE, 730, 800, "Node6", node=6),
        row(RowKind.ACCUMULATE, 800, 810, "AccumulateGrad"),
        row(RowKind.NODE, 810, 900, "Node4", node=4),
        row(RowKind.ACCUMULATE, 900, 940, "AccumulateGrad"),
        row(RowKind.COMMUNICATION, 910, 930, "c10d::allreduce_"),
        row(RowKind.NODE, 940, 1000, "Node2", node=2),
        row(RowKind.ACCUMULATE, 1000, 1030, "AccumulateGrad"),
        row(RowKind.COMMUNICATION, 1010, 1020, "c10d::allreduce_"),
        row(RowKind.COMMUNICATION, 915, 1200, "gloo:all_reduce", 3),
        row(RowKind.COMMUNICATION, 1015, 1800, "gloo:all_reduce", 4),
        row(RowKind.COMMUNICATION, 1200, 1205, COPY),
        row(RowKind.COMMUNICATION, 1205, 1210, COPY),
        row(RowKind.COMMUNICATION, 1800, 1805, COPY),
    ]
    until = (at + length * 720) * US
    return [each for each in rows if synced or each.kind != RowKind.COMMUNICATION or each.start < until]


def _found(lengths: tuple[int, ...], skip: int, left_out: tuple[int, ...], *, device: bool) -> Attribution:
    """The result of steps of these lengths."""
    begins = np.concatenate([[0], np.cumsum(np.abs(lengths))]).tolist()
    rows = [row for n, length in enumerate(lengths) for row in _step(n, begins[n] * STEP_US, length)]
    end = begins[-1] * STEP_US * US
    rows.append(Row(RowKind.STEP, end, end, "step", argument=len(lengths)))
    table = table_of(*rows)
    if device:
        named = {name: np.flatnonzero(table.name == table.names.index(name)) for name in ("c10d::allreduce_", "Node2")}
        launched = np.concatenate([named["c10d::allreduce_"][::2], named["Node2"]])
        kind = np.repeat([0, 1], len(lengths))
        start = table.start_ns[launched] + np.where(kind == 0, 20 * US, 0)
        order = np.argsort(start, kind="stable")
        one = np.zeros(len(start), np.int64)
        kernels = KernelTable(
            KERNELS, kind[order], start[order], start[order] + 45 * US, one, one, launched[order].astype(np.int64)
        )
        table = replace(table, kernels=kernels)
    entries = [
        (label, 10 * number + low, 10 * number + high)
        for number in range(len(lengths))
        for label, low, high in ((0, 0, 9), (1, 1, 3), (2, 3, 5), (3, 5, 8))
    ]
    skeleton = read_skeleton(table, spans(*entries), [-1, 0, 0, 0], paths=PATHS)
    assigned = assign(skeleton, skip, None, left_out=left_out)
    return build_result(assigned, MODULES, (), None, {}, has_flops=False, reducers=(REDUCER,))


def _means(found: Attribution) -> list[LayerRow]:
    """The layers without what is said of each step by itself."""
    return [replace(row, backward_self_steps_ns=(), forward_self_steps_ns=()) for row in found.layers]


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("lengths", "skip", "left_out"),
    [((1, 1), 0, ()), ((1, 1, 1), 0, ()), ((3, 1, 1), 1, ()), ((1, 2, 1), 0, (1,)), ((3, 1, 2), 1, (2,))],
    ids=["two", "three", "warm-up", "interrupted", "both"],
)
def test_steps_that_are_alike_have_the_means_of_one(
    lengths: tuple[int, ...], skip: int, left_out: tuple[int, ...], device: bool
) -> None:
    one = _found((1,), 0, (), device=device)
    found = _found(lengths, skip, left_out, device=device)
    assert one.step.communication_ns and one.buckets and sum(row.forward_communication_ns for row in one.layers)
    assert sum(row.overlapped_communication_ns for row in one.layers) > 0 or not device
    assert (found.step.communication_ns, found.ledger) == (one.step.communication_ns, one.ledger)
    assert _means(found) == _means(one)
    assert (found.buckets, found.device) == (one.buckets, one.device)
    assert [(op.layer, op.phase, op.name, op.self_ns) for op in found.ops] == [
        (op.layer, op.phase, op.name, op.self_ns) for op in one.ops
    ]


@pytest.mark.parametrize("lengths", [(1, -1), (-1, 1, -1, -1), (1, 1, -1)])
def test_where_gradients_are_accumulated_waits_are_spread_over_all_steps(lengths: tuple[int, ...]) -> None:
    """What buckets and operations tell of a mean step is the same."""
    one, found = _found((1,), 0, (), device=False), _found(lengths, 0, (), device=False)
    assert one.buckets is not None and found.buckets is not None
    synced = sum(length > 0 for length in lengths)
    for row, alone in zip(found.buckets, one.buckets, strict=True):
        assert row == replace(alone, exposed_ns=alone.exposed_ns * synced // len(lengths))
    waited = sum(op.self_ns for op in found.ops if op.name == "(waits for other ranks)")
    assert sum(row.exposed_ns for row in found.buckets) == pytest.approx(waited, abs=len(found.buckets) + 4)


def test_communication_is_no_more_than_its_step() -> None:
    for device in (False, True):
        found = _found((1, 1), 0, (), device=device)
        assert 0 < (found.step.communication_ns or 0) <= found.step.wall_ns
        assert all(0 <= row.forward_communication_ns <= row.forward_self_ns for row in found.layers)
