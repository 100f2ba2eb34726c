"""Truth: in every structure the peak is that of the same program alone, to the byte, and gradscope adds nothing to it.

Three counts, of which two are not gradscope's: torch's profiler over the program without gradscope, from before its
model is built; torch's own running total in the run that gradscope measures; and what gradscope reports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradscope.trace.reader
from gradscope import markers
from gradscope.compat import kineto_tree, quiet_kineto
from tests.structures.every import EVERY
from tests.structures.kit import Step, Structure
from tests.truth.burning import Meter

from .measuring import bytes_of_all_tensors, in_a_loop, memory_of
from .test_independent import total_allocated


@contextmanager
def counting() -> Iterator[None]:
    """Let torch's allocator count all that it gives and takes back, also while no profiler runs."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    switch = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    switch.value = True
    try:
        yield
    finally:
        switch.value = False


def counted_now() -> int:
    """Bytes that are allocated, of those given since counting began."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet_kineto():
        profiler.start()
        torch.empty(1)
        profiler.stop()
    first = min(_totals(kineto_tree(profiler))[0])
    return first[1] - first[2]


def _totals(roots: list[Any]) -> tuple[list[tuple[int, int, int]], dict[str, int]]:
    """(time, total, change) of each event of the allocator, and when each step's marker was."""
    totals, steps, stack = [], {}, list(roots)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name.startswith(markers.STEP):
            steps[event.name] = event.start_time_ns
    return totals, steps


def seeded(structure: Structure) -> Callable[[], Step]:
    """The same random numbers in both runs: how many rows of a table a batch reads depends on them."""

    def again() -> Step:
        torch.manual_seed(0)
        return structure.build(Meter(scale=0)).step

    return again


def both(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Peak as reported; as torch counts it in the measured step; steps that were taken."""
    peaks: list[int] = []
    original = gradscope.trace.reader.read_memory_trace

    def read(profiler: Any) -> Any:
        totals, steps = _totals(kineto_tree(profiler))
        begin, end = steps[f"{markers.STEP}1"], steps[f"{markers.STEP}2"]
        peaks.append(max(total for time, total, _ in totals if begin <= time <= end))
        return original(profiler)

    monkeypatch.setattr(gradscope.trace.reader, "read_memory_trace", read)
    with counting():
        foreign, before = bytes_of_all_tensors(), counted_now()
        step, taken = seeded(structure)(), []

        def once() -> None:
            step()
            taken.append(1)

        reported = memory_of(in_a_loop(None, once)).peak_bytes
    return reported - foreign, peaks[0] - before, len(taken)


@pytest.mark.parametrize("structure", EVERY, ids=lambda structure: structure.name)
def test_peak(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    with structure.around():
        reported, counted, steps = both(structure, monkeypatch)
        assert (reported, counted) == (total_allocated(seeded(structure), steps),) * 2


def test_there_are_enough_structures() -> None:
    assert len(EVERY) >= 40
