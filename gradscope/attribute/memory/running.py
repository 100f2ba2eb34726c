"""The running total of the measured step: where it peaks, and how far each layer raises it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.memory.blocks import Blocks
from gradscope.attribute.memory.classify import Classified, backward_windows
from gradscope.attribute.memory.places import MemoryTrace
from gradscope.attribute.rows import Category
from gradscope.tables import IntColumn, PhaseSpan, RowKind, TimelinePoint

_POINTS = 400  # of a timeline: more than a terminal or a page shows


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


def timeline_of(trace: MemoryTrace, running: Running) -> tuple[TimelinePoint, ...]:
    """The running total, thinned to the lowest and highest point of each stretch of time; the ends are kept."""
    time, total = running.time_ns - trace.start_ns, running.total
    keep = {0, len(total) - 1, running.peak}
    if len(total) <= _POINTS:
        keep |= set(range(len(total)))
    else:
        edges = np.linspace(0, trace.end_ns - trace.start_ns, _POINTS // 2 + 1)
        bounds = np.searchsorted(time, edges)
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if high > low:
                keep |= {low + int(np.argmax(total[low:high])), low + int(np.argmin(total[low:high]))}
    return tuple(TimelinePoint(int(time[entry]), int(total[entry])) for entry in sorted(keep))


def phases_of(trace: MemoryTrace) -> tuple[PhaseSpan, ...]:
    """Forward, backward and optimizer as stretches of the measured step, and what lies between as "other"."""
    table, assigned = trace.table, trace.assigned
    here = assigned.steps.of_row == 0
    spans: list[tuple[int, int, str]] = []
    forward = here & (assigned.rows.category == Category.FORWARD)
    optimizer = here & (table.kind == RowKind.OPTIMIZER)
    for phase, mask in (("forward", forward), ("optimizer", optimizer)):
        rows = np.flatnonzero(mask)
        spans += [
            (start, end, phase)
            for start, end in zip(table.start_ns[rows].tolist(), table.end_ns[rows].tolist(), strict=True)
        ]
    for start, end in zip(*(column.tolist() for column in backward_windows(trace)), strict=True):
        if trace.start_ns <= start < trace.end_ns:
            spans.append((start, end, "backward"))
    return tuple(_tiled(sorted(spans), trace.start_ns, trace.end_ns))


def _tiled(spans: Sequence[tuple[int, int, str]], start: int, end: int) -> list[PhaseSpan]:
    """Merge neighbours of one phase, and fill what is between."""
    merged: list[tuple[int, int, str]] = []
    for low, high, phase in spans:
        if merged and merged[-1][2] == phase:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high), phase)
        else:
            merged.append((low, high, phase))
    tiles: list[PhaseSpan] = []
    at = start
    for low, high, phase in merged:
        first, last = max(low, at), min(high, end)
        if last <= first:
            continue
        if first > at:
            tiles.append(PhaseSpan("other", at - start, first - start))
        tiles.append(PhaseSpan(phase, first - start, last - start))
        at = last
    if at < end:
        tiles.append(PhaseSpan("other", at - start, end - start))
    return tiles
