"""Kernels below the operation that launched them: on hand-made tables, and in a whole run with a made-up device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from gradscope.tables import EventTable, KernelTable, RowKind
from gradscope.trace.events import launchers, without_parts_of_ops
from gradscope.trace.reader import TraceReader


def test_a_kernel_finds_the_row_of_its_correlation() -> None:
    rows = np.array([7, 3, 9], np.int64)
    assert launchers(rows, np.array([9, 7, 4, 3, 100, -1], np.int64)).tolist() == [2, 0, -1, 1, -1, -1]
    assert launchers(np.empty(0, np.int64), np.array([9], np.int64)).tolist() == [-1]


def test_what_a_part_of_an_op_launched_is_the_ops() -> None:
    # (python) > aten::linear > aten::addmm > aten::copy_, then aten::sum > aten::fill_
    parent = [-1, 0, 1, 2, 0, 4]
    names = ("mine", "aten::linear", "aten::addmm", "aten::copy_", "aten::sum", "aten::fill_")
    count = len(parent)
    depth = [0, 1, 2, 3, 1, 2]
    nothing = np.zeros(3, np.int64)
    table = EventTable(
        names=names,
        name=np.arange(count, dtype=np.int32),
        kind=np.full(count, RowKind.OP, np.int8),
        argument=np.full(count, -1),
        start_ns=np.arange(count),
        end_ns=np.arange(count) + 1,
        thread=np.ones(count, np.int32),
        sequence=np.full(count, -1),
        forward_thread=np.zeros(count, np.int32),
        parent=np.array(parent, np.int32),
        depth=np.array(depth, np.int32),
        kernels=KernelTable(("k",), nothing, nothing, nothing, nothing, nothing, np.array([3, 5, -1])),
    )
    kept = without_parts_of_ops(table)
    assert [names[name] for name in kept.name] == ["mine", "aten::linear", "aten::sum"]
    assert kept.kernels is not None
    assert kept.kernels.row.tolist() == [1, 2, -1]


def _with_kernels(table: EventTable) -> EventTable:
    """Two kernels for each matrix product, the second half as long as the first; they overlap by half of it."""
    wanted = {place for place, name in enumerate(table.names) if name in ("aten::linear", "aten::mm", "aten::addmm")}
    rows = np.flatnonzero(np.isin(table.name, list(wanted)))
    long = np.maximum(table.end_ns[rows] - table.start_ns[rows], 8) // 8 * 8
    first, second = table.start_ns[rows], table.start_ns[rows] + long * 3 // 4
    start, end = np.concatenate([first, second]), np.concatenate([first + long, second + long // 2])
    name = np.repeat([0, 1], len(rows))
    order = np.argsort(start, kind="stable")
    nothing = np.zeros(2 * len(rows), np.int64)
    kernels = KernelTable(
        ("gemm", "epilogue"), name[order], start[order], end[order], nothing, nothing, np.tile(rows, 2)[order]
    )
    return replace(table, kernels=kernels)


def test_kernels_are_a_part_of_their_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = TraceReader.timed
    monkeypatch.setattr(
        TraceReader, "timed", lambda reader, profiler, **how: _with_kernels(timed(reader, profiler, **how))
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    data = gradscope.profile(model, torch.ones(32, 64), steps=2, warmup=1, memory=False).data
    assert {(row.layer, row.phase) for row in data.kernels} == {
        (layer, phase) for layer in ("0", "2") for phase in ("forward", "backward")
    }
    operations = {(row.layer, row.phase, row.name): row for row in data.ops}
    busy: dict[Any, int] = defaultdict(int)
    for row in data.kernels:
        assert row.op is not None and row.busy_ns is not None
        assert 0 <= row.busy_ns <= row.device_ns
        busy[row.layer, row.phase, row.op] += row.busy_ns
    for key, ns in busy.items():
        assert operations[key].self_ns >= ns - 2, key  # means over two steps, rounded apart
        assert operations[key].calls == int(operations[key].calls), key
    assert not {"gemm", "epilogue"} & {row.name for row in data.ops}
    for name in ("0", "2"):
        row = next(row for row in data.layers if row.path == name)
        whole = sum(kernel.device_ns for kernel in data.kernels if kernel.layer == name)
        assert row.device_ns == pytest.approx(whole, abs=8)  # each rounded down


def test_what_is_listed_below_a_layer_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nanosecond; and a live profile's kernels are those of the steps that count."""
    timed = TraceReader.timed
    monkeypatch.setattr(
        TraceReader, "timed", lambda reader, profiler, **how: _with_kernels(timed(reader, profiler, **how))
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    data = gradscope.profile(model, torch.ones(32, 64), steps=3, warmup=1, memory=False).data
    listed = defaultdict(int)
    for kernel in data.kernels:
        listed[kernel.layer] += kernel.device_ns
    assert all(listed[row.path] == row.device_ns for row in data.layers)
    assert data.device is not None
    assert data.device.elsewhere_ns == 0  # the settling step launched as many
    # Each of both is rounded down, kernel by kernel.
    assert 0 <= data.device.kernel_ns - sum(listed.values()) < len(data.kernels)
