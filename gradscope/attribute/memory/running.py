"""The running total of the measured step: where it peaks, and how far each layer raises it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope.attribute.memory.blocks import Blocks
from gradscope.attribute.memory.classify import Classified
from gradscope.attribute.memory.event_owners import MemoryTrace
from gradscope.tables import IntColumn, RowKind


@dataclass(frozen=True, slots=True)
class Running:
    """Bytes alive after each allocator event of the measured step; entry 0 is its start."""

    first: int  # the step's first event, as a position among the trace's
    time_ns: IntColumn  # of each entry
    total: IntColumn

    @property
    def peak(self) -> int:
        """Entry with the largest total, the first of equals."""
        return int(np.argmax(self.total))


def run_total(trace: MemoryTrace, blocks: Blocks, classified: Classified) -> Running:
    """Add births and take deaths, event by event."""
    times = blocks.events.time_ns
    first = int(np.searchsorted(times, trace.start_ns))
    last = int(np.searchsorted(times, trace.end_ns))
    change = np.zeros(last - first + 1, np.int64)
    alive = classified.block
    size, born, died = blocks.bytes[alive], blocks.born[alive], blocks.died[alive]
    np.add.at(change, np.where(born < first, 0, born - first + 1), size)
    dies = died < last
    np.subtract.at(change, died[dies] - first + 1, size[dies])
    return Running(first, np.concatenate([[trace.start_ns], times[first:last]]), np.cumsum(change))


def alive_at(running: Running, blocks: Blocks, classified: Classified, entry: int) -> IntColumn:
    """Indices into ``classified`` of the blocks that make up ``running.total[entry]``."""
    position = running.first + entry  # events before this one have happened
    born, died = blocks.born[classified.block], blocks.died[classified.block]
    return np.flatnonzero((born < position) & (died >= position))


def rise_of_layers(trace: MemoryTrace, running: Running, layers: int) -> IntColumn:
    """For each layer the largest rise above what was allocated when a call, or one of its nodes, began."""
    table, assigned = trace.table, trace.assigned
    wanted = np.isin(table.kind, (RowKind.CALL, RowKind.NODE)) & (assigned.steps.of_row == 0)
    rows = np.flatnonzero(wanted & (assigned.rows.owner >= 0))
    first = np.searchsorted(running.time_ns, table.start_ns[rows], side="right") - 1
    last = np.searchsorted(running.time_ns, table.end_ns[rows], side="right")
    rise = np.zeros(layers, np.int64)
    for layer, low, high in zip(assigned.rows.owner[rows].tolist(), first.tolist(), last.tolist(), strict=True):
        if 0 <= low < high:
            rise[layer] = max(int(rise[layer]), int(running.total[low:high].max() - running.total[low]))
    return rise
