"""Readers of the traces of one run: what each pass has its rows read by, and stretches joined to one trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradscope.compat import release_profiler
from gradscope.tables import EventTable, IntColumn, KernelTable, RowKind
from gradscope.trace.events import read_trace
from gradscope.trace.memory import read_memory_trace


class TraceReader:
    """Reads stopped profilers, and lets go of what they hold.

    Args:
        device: the traces may hold device activities; None: where CUDA is in use when one is read.
    """

    def __init__(self, *, device: bool | None = None) -> None:
        self._device = device

    def timed(self, profiler: Any, *, calls: bool = True) -> EventTable:
        """The rows of steps that were timed; ``calls`` as in :func:`gradscope.trace.events.read_trace`."""
        return self._read(read_trace, profiler, device=self._on_device(), calls=calls)

    def surveyed(self, profiler: Any, *, shapes: bool, flops: bool) -> EventTable:
        """The rows of the survey; with FLOPs, whose markers lie inside of ops, all of them."""
        return self._read(read_trace, profiler, device=self._on_device(), shapes=shapes, whole=flops)

    def memory(self, profiler: Any) -> EventTable:
        """The rows of the memory pass, with its allocations."""
        return self._read(read_memory_trace, profiler)

    def _read(self, read: Callable[..., EventTable], profiler: Any, **how: Any) -> EventTable:
        table = read(profiler, **how)
        release_profiler(profiler)
        return table

    def _on_device(self) -> bool:
        return torch.cuda.is_initialized() if self._device is None else self._device


@dataclass(frozen=True, slots=True)
class _Part:
    """The table of one stretch, and what is kept of it."""

    table: EventTable
    rows: IntColumn
    place: IntColumn  # of each row of the table among those of the whole; -1 where it is left out
    first_ns: int  # what began before begins there
    last_ns: int  # and ends there at the latest
    shift_ns: int


def joined(tables: Sequence[EventTable]) -> EventTable:
    """Rows of several profilers, each of which began where a step begins and stopped where one ends.

    Each stretch is moved to where the one before ended, so that the steps follow each other. A row keeps its duration
    unless it lies across an end of its stretch, as one of another thread may. The first STEP row of a later stretch
    says again what the last of the one before said, and is left out.
    """
    if len(tables) == 1:
        return tables[0]
    parts = _parts(tables)
    names: dict[str, int] = {}

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(part.table, name)[part.rows] for part in parts])

    def times(name: str) -> IntColumn:
        return np.concatenate(
            [np.clip(getattr(p.table, name)[p.rows], p.first_ns, p.last_ns) + p.shift_ns for p in parts]
        )

    renamed = [np.array([names.setdefault(text, len(names)) for text in part.table.names], np.int32) for part in parts]
    name = np.concatenate([new[part.table.name[part.rows]] for new, part in zip(renamed, parts, strict=True)])
    parent = np.concatenate([_moved(part.place, part.table.parent[part.rows]) for part in parts])
    thread = column("thread")
    # Stable: within a thread the stretches follow each other, and within one its rows keep their order.
    order = np.argsort(thread, kind="stable")
    after = np.empty(len(order), np.int64)
    after[order] = np.arange(len(order))
    return EventTable(
        names=tuple(names),
        name=name[order],
        kind=column("kind")[order],
        argument=column("argument")[order],
        start_ns=times("start_ns")[order],
        end_ns=times("end_ns")[order],
        thread=thread[order],
        sequence=column("sequence")[order],
        forward_thread=column("forward_thread")[order],
        parent=_moved(after, parent[order]).astype(np.int32),
        depth=column("depth")[order],
        kernels=_kernels(parts, after),
    )


def _parts(tables: Sequence[EventTable]) -> list[_Part]:
    parts: list[_Part] = []
    taken, at_ns = 0, 0
    for number, table in enumerate(tables):
        marks = np.flatnonzero(table.kind == RowKind.STEP)
        marks = marks[np.argsort(table.argument[marks])]
        begin, end = int(marks[0]), int(marks[-1])
        is_first, is_last = number == 0, number == len(tables) - 1
        first = int(table.start_ns.min() if is_first else table.start_ns[begin])
        last = int(table.end_ns.max()) if is_last else _end_of_step(table, end)
        keep = (table.end_ns >= first) & (table.start_ns <= last)
        if not is_first:
            keep[begin] = False
        rows = np.flatnonzero(keep)
        place = np.full(len(table), -1, np.int64)
        place[rows] = np.arange(taken, taken + len(rows))
        shift = 0 if is_first else at_ns - first
        parts.append(_Part(table, rows, place, first, last, shift))
        taken, at_ns = taken + len(rows), last + shift
    return parts


def _end_of_step(table: EventTable, mark: int) -> int:
    """The end of the step that a STEP row marks: with the optimizer's row around it, as attribution has it."""
    row = int(table.parent[mark])
    while row >= 0:
        if table.kind[row] == RowKind.OPTIMIZER:
            return int(table.end_ns[row])
        row = int(table.parent[row])
    return int(table.start_ns[mark])


def _moved(place: IntColumn, rows: npt.NDArray[np.integer]) -> IntColumn:
    """New numbers of rows; what is none stays."""
    return np.where(rows >= 0, place[rows], rows)


def _kernels(parts: Sequence[_Part], after: IntColumn) -> KernelTable | None:
    found = [(part, part.table.kernels) for part in parts if part.table.kernels is not None]
    if not found:
        return None
    names: dict[str, int] = {}
    moved = []
    for part, kernels in found:
        new = np.array([names.setdefault(text, len(names)) for text in kernels.names], np.int64)
        row = _moved(after, _moved(part.place, kernels.row))
        shift = part.shift_ns
        moved.append(
            replace(
                kernels,
                name=new[kernels.name],
                start_ns=kernels.start_ns + shift,
                end_ns=kernels.end_ns + shift,
                row=row,
            )
        )

    def column(name: str) -> IntColumn:
        return np.concatenate([getattr(each, name) for each in moved])

    return KernelTable(
        tuple(names),
        column("name"),
        column("start_ns"),
        column("end_ns"),
        column("device"),
        column("stream"),
        column("row"),
    )
