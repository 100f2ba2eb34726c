"""Allocator events -> blocks: every stretch of memory from its allocation to its release, and who was seen in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.tables import AllocationTable, IntColumn, Role, SavedTensor, Sighting

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class SeenAs:
    """One sighting of a block."""

    mark: int
    role: Role
    layer: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """All blocks of a trace on one device; ``born`` and ``died`` are positions among ``events``.

    A block that was there before the trace was born at -1 and has no row. One that was never released died at
    :data:`NEVER`.
    """

    events: AllocationTable  # of the device, in order of time
    bytes: IntColumn
    born: IntColumn
    died: IntColumn
    seen: Sequence[Sequence[SeenAs]]  # of each block
    of_saved: Sequence[int]  # block of each saved tensor; -1 for one of before the measured step

    def rows(self, position: IntColumn) -> IntColumn:
        """Return the trace row around each event; -1 for an event that is none (before the trace, or never)."""
        found = np.full(len(position), -1, np.int64)
        real = (position >= 0) & (position < len(self.events))
        found[real] = self.events.row[position[real]]
        return found

    def times(self, position: IntColumn) -> IntColumn:
        """Time of each event; the smallest and largest number for the two that are none."""
        found = np.where(position < 0, np.iinfo(np.int64).min, NEVER)
        real = (position >= 0) & (position < len(self.events))
        found[real] = self.events.time_ns[position[real]]
        return found


def events_of(table: AllocationTable, device: str) -> AllocationTable:
    """The events of one device."""
    number = table.device.index(device) if device in table.device else -1
    keep = np.flatnonzero(table.device_of == number)
    return AllocationTable(
        row=table.row[keep],
        time_ns=table.time_ns[keep],
        pointer=table.pointer[keep],
        bytes=table.bytes[keep],
        device=(device,),
        device_of=np.zeros(len(keep), np.int8),
        reserved=table.reserved[keep],
    )


def build_blocks(
    events: AllocationTable,
    marks: Sequence[tuple[int, int]],
    base: int,
    sightings: Sequence[Sighting],
    saved: Sequence[SavedTensor],
) -> Blocks:
    """Pair allocations with releases, and find the block behind every address that was noted.

    Args:
        marks: (time, number) of every moment at which addresses were noted, in order of time.
        base: number of the moment that starts the measured step: what was seen there, and not allocated in the trace,
            was there before. The allocator of the CPU does not report the release of such blocks; they last until
            their address is given out again.
        sightings, saved: the notes; addresses that belong to no block and were not seen at ``base`` are left out,
            but what a node saved was there in any case.
    """
    return _Builder(events, base, sightings, saved).build(marks)


class _Builder:
    def __init__(
        self, events: AllocationTable, base: int, sightings: Sequence[Sighting], saved: Sequence[SavedTensor]
    ) -> None:
        self._events, self._base, self._saved = events, base, saved
        self._sightings_at: dict[int, list[Sighting]] = defaultdict(list)
        for sighting in sightings:
            self._sightings_at[sighting.mark].append(sighting)
        self._saved_at: dict[int, list[int]] = defaultdict(list)
        for index, note in enumerate(saved):
            self._saved_at[note.mark].append(index)
        self._live: dict[int, int] = {}  # address -> block
        self._bytes: list[int] = []
        self._born: list[int] = []
        self._died: list[int] = []
        self._seen: list[list[SeenAs]] = []
        self._of_saved = [-1] * len(saved)

    def build(self, marks: Sequence[tuple[int, int]]) -> Blocks:
        events = self._events
        waiting = list(reversed(marks))
        columns = zip(events.time_ns.tolist(), events.pointer.tolist(), events.bytes.tolist(), strict=True)
        for position, (time, pointer, size) in enumerate(columns):
            while waiting and waiting[-1][0] <= time:
                self._look(waiting.pop()[1])
            self._apply(position, pointer, size)
        while waiting:
            self._look(waiting.pop()[1])
        return Blocks(
            events,
            np.array(self._bytes, np.int64),
            np.array(self._born, np.int64),
            np.array(self._died, np.int64),
            self._seen,
            self._of_saved,
        )

    def _apply(self, position: int, pointer: int, size: int) -> None:
        old = self._live.pop(pointer, None)
        if old is not None:
            self._died[old] = position
        if size > 0:
            self._live[pointer] = self._new(size, position)

    def _new(self, size: int, born: int) -> int:
        self._bytes.append(size)
        self._born.append(born)
        self._died.append(NEVER)
        self._seen.append([])
        return len(self._bytes) - 1

    def _look(self, mark: int) -> None:
        """Find the blocks of what was noted at this moment."""
        for sighting in self._sightings_at.get(mark, ()):
            block = self._live.get(sighting.pointer)
            if block is None:
                if mark != self._base:
                    continue
                block = self._live[sighting.pointer] = self._new(sighting.bytes, -1)
            self._seen[block].append(SeenAs(mark, sighting.role, sighting.layer))
        for index in self._saved_at.get(mark, ()):
            note = self._saved[index]
            block = self._live.get(note.pointer)
            if block is None:
                if mark < self._base:
                    continue
                block = self._live[note.pointer] = self._new(note.bytes, -1)
            self._of_saved[index] = block
