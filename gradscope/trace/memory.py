"""Reads the trace of a pass that recorded memory: every row, what the allocators gave and took back, and peaks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradscope.compat import kineto_events, kineto_tree, new_profiler, start_memory_profiler, stop_profiler
from gradscope.tables import AllocationTable, EventTable, Int32Column, IntColumn
from gradscope.trace.events import make_table, row_order
from gradscope.trace.names import EVALUATE
from gradscope.trace.tree import Interner, RawColumns, no_garbage_collection

_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_ALLOCATION, _OP = "Allocation", "TorchOp"  # of torch._C._profiler._EventType


def read_memory_trace(profiler: Any) -> EventTable:
    """The rows of a stopped profiler that recorded memory, with their :class:`AllocationTable`.

    Only the steps that measure memory are read here, so a plain walk will do. What an op calls below autograd is a row
    too: it says which part of a composite op allocated.
    """
    with no_garbage_collection():
        walk = _TreeWalk()
        walk.run(kineto_tree(profiler))
        columns = walk.columns()
        table = make_table(columns, walk.names, walk.scopes)
        place = np.empty(len(columns.name) + 1, np.int32)
        place[row_order(columns)] = np.arange(len(columns.name))
        place[-1] = -1  # of no row
        return replace(table, allocations=walk.allocations(place))


class _TreeWalk:
    """One walk over the trees; parents before children, siblings in order."""

    def __init__(self) -> None:
        self.names = Interner()
        self.scopes: list[int] = []
        self._name, self._thread = array("i"), array("i")
        self._start, self._end, self._sequence = array("q"), array("q"), array("q")
        self._backward = array("b")
        self._devices: dict[str, int] = {}
        self._around, self._device = array("i"), array("b")
        self._time, self._pointer, self._bytes, self._reserved = array("q"), array("q"), array("q"), array("q")

    def run(self, roots: list[Any]) -> None:
        """Walk ``roots`` and all below."""
        stack = [(root, root.start_tid, -1) for root in reversed(roots)]
        while stack:
            event, thread, around = stack.pop()
            kind = event.tag.name
            if kind == _ALLOCATION:
                self._note_allocation(event, around)
                continue
            if kind == _OP:
                self._note_row(event, thread)
                around = len(self._name) - 1
            stack.extend((child, thread, around) for child in reversed(event.children))

    def _note_row(self, event: Any, thread: int) -> None:
        fields = event.extra_fields
        scope = int(fields.scope)
        number = self.names[event.name]
        if number == len(self.scopes):
            self.scopes.append(scope)
        self._name.append(number)
        self._thread.append(thread)
        self._start.append(event.start_time_ns)
        self._end.append(event.end_time_ns)
        self._sequence.append(fields.sequence_number)
        self._backward.append(scope == _BACKWARD_SCOPE or event.name.startswith(EVALUATE))

    def _note_allocation(self, event: Any, around: int) -> None:
        fields = event.extra_fields
        if not fields.ptr or not fields.alloc_size:
            return
        self._around.append(around)
        self._device.append(self._devices.setdefault(str(fields.device), len(self._devices)))
        self._time.append(event.start_time_ns)
        self._pointer.append(_signed(fields.ptr))
        self._bytes.append(fields.alloc_size)
        self._reserved.append(fields.total_reserved)

    def columns(self) -> RawColumns:
        """The rows, in the order of the walk."""
        start, end = np.frombuffer(self._start, np.int64), np.frombuffer(self._end, np.int64)
        if len(end):
            # What was open when the profiler stopped has no end in torch 2.11; it lasted to the end of the trace.
            end = np.where(end < start, end.max(), end)
        thread = np.frombuffer(self._thread, np.int32)
        sequence = np.frombuffer(self._sequence, np.int64)
        backward = np.frombuffer(self._backward, np.int8).astype(bool)
        return RawColumns(
            name=np.frombuffer(self._name, np.int32),
            start_ns=start,
            end_ns=end,
            thread=thread,
            sequence=sequence,
            forward_thread=_forward_thread(thread, sequence, backward),
        )

    def allocations(self, place: Int32Column) -> AllocationTable:
        """The allocators' events, in order of time.

        Args:
            place: row of the finished table for each row of the walk; its last entry stands for no row.
        """
        time = np.frombuffer(self._time, np.int64)
        order = np.argsort(time, kind="stable")
        return AllocationTable(
            row=place[np.frombuffer(self._around, np.int32)][order],
            time_ns=time[order],
            pointer=np.frombuffer(self._pointer, np.int64)[order],
            bytes=np.frombuffer(self._bytes, np.int64)[order],
            device=tuple(self._devices),
            device_of=np.frombuffer(self._device, np.int8)[order],
            reserved=np.frombuffer(self._reserved, np.int64)[order],
        )


def _forward_thread(thread: Int32Column, sequence: IntColumn, backward: np.ndarray) -> Int32Column:  # type: ignore[type-arg]
    """The thread that drew the numbers of backward rows: only one does, in a profiler of one thread."""
    drew = thread[(sequence >= 0) & ~backward]
    made_by = np.bincount(drew).argmax() if len(drew) else 0
    return np.where(backward & (sequence >= 0), made_by, 0).astype(np.int32)


def _signed(pointer: int) -> int:
    """An address as a signed number of 64 bits: some devices use the upper half."""
    return pointer - (1 << 64) if pointer >= 1 << 63 else pointer


_COUNTED = "gradscope: the run that is counted"


def peak_bytes(work: Callable[[], object], device: torch.device, *, settled: bool = False) -> int:
    """Peak of ``work`` above its start, in bytes of torch's allocator; it runs twice, the second counts.

    Where it is ``settled``, it ran before and releases nothing that it did not allocate, once is enough.
    """
    return peaks_bytes([work], device, settled=settled)[0]


def peaks_bytes(works: Sequence[Callable[[], object]], device: torch.device, *, settled: bool = False) -> list[int]:
    """:func:`peak_bytes` of each, in one go: starting the profiler takes longer than a small step."""
    if device.type == "cuda":
        return [_on_cuda(work, device, settled=settled) for work in works]
    profiler = new_profiler(memory=True)
    kept = start_memory_profiler(profiler)
    try:
        for index, work in enumerate(works):
            if not settled:
                work()  # the profiler sees the release of that alone whose allocation it has seen
            with torch.profiler.record_function(f"{_COUNTED} {index}"):
                work()
    finally:
        stop_profiler(profiler)
    del kept
    events = kineto_events(profiler)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name().startswith(_COUNTED)}
    return [_most(changes, *spans[f"{_COUNTED} {index}"]) for index in range(len(works))]


def _most(changes: list[tuple[int, int]], start: int, end: int) -> int:
    now = most = 0
    for when, change in changes:
        if start <= when < end:
            now += change
            most = max(most, now)
    return most


def _on_cuda(work: Callable[[], object], device: torch.device, *, settled: bool) -> int:
    if not settled:
        work()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
