"""The course of the measured step: what was allocated when, of which category, and in which phase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradscope.attribute.memory.blocks import Blocks
from gradscope.attribute.memory.classify import Classified, backward_windows
from gradscope.attribute.memory.event_owners import MemoryTrace
from gradscope.attribute.memory.running import Running
from gradscope.attribute.rows import Category
from gradscope.tables import (
    CategoryCourse,
    IntColumn,
    MemoryCategory,
    PhaseSpan,
    RowKind,
    TimelinePoint,
)

_POINTS = 400  # of a timeline: more than a terminal or a page shows


def kept_entries(trace: MemoryTrace, running: Running, phases: Sequence[PhaseSpan]) -> IntColumn:
    """Entries of the running total that a timeline shows: the lowest and highest of each stretch of time and of each
    phase, the ends, and the peak."""
    time, total = running.time_ns - trace.start_ns, running.total
    if len(total) <= _POINTS:
        return np.arange(len(total))
    keep = {0, len(total) - 1, running.peak}
    edges = np.linspace(0, trace.end_ns - trace.start_ns, _POINTS // 2 + 1)
    bounds = np.searchsorted(time, edges)
    stretches = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    for phase in phases:
        # What was allocated when a phase began is an event of the one before.
        low = max(int(np.searchsorted(time, phase.start_ns, side="right")) - 1, 0)
        stretches.append((low, int(np.searchsorted(time, phase.end_ns))))
    for low, high in stretches:
        if high > low:
            keep |= {low + int(np.argmax(total[low:high])), low + int(np.argmin(total[low:high]))}
    return np.array(sorted(keep))


def timeline_of(trace: MemoryTrace, running: Running, entries: IntColumn) -> tuple[TimelinePoint, ...]:
    """The running total at ``entries``."""
    time, total = running.time_ns[entries] - trace.start_ns, running.total[entries]
    return tuple(TimelinePoint(at, size) for at, size in zip(time.tolist(), total.tolist(), strict=True))


def categories_of(
    running: Running, blocks: Blocks, classified: Classified, entries: IntColumn
) -> tuple[CategoryCourse, ...]:
    """The running total at ``entries`` by category, in the order of :class:`MemoryCategory`, but for those that are 0
    at all of them.

    What was saved is an activation from when the last node that kept it has run: somebody else holds it.
    """
    count, alive = len(running.total), classified.block
    size = blocks.bytes[alive]
    first = np.clip(blocks.born[alive] - running.first + 1, 0, count)
    # One that never died did so at the largest number, which leaves no room for an addition.
    last = np.minimum(blocks.died[alive], running.first + count) - running.first + 1
    order = list(MemoryCategory)
    category_of = np.array([order.index(category) for category in classified.category], np.int64)
    was_saved = category_of == order.index(MemoryCategory.SAVED)
    released = was_saved & (classified.saved_until > np.iinfo(np.int64).min)
    until = np.searchsorted(running.time_ns, classified.saved_until, side="right")
    until = np.where(released, np.clip(until, first, last), last)
    result = []
    for number, category in enumerate(order):
        change = np.zeros(count + 2, np.int64)
        mine = category_of == number
        np.add.at(change, first[mine], size[mine])
        np.subtract.at(change, until[mine], size[mine])
        if category is MemoryCategory.ACTIVATION:
            np.add.at(change, until[was_saved], size[was_saved])
            np.subtract.at(change, last[was_saved], size[was_saved])
        course = np.cumsum(change)[entries]
        if course.any():
            result.append(CategoryCourse(category.value, tuple(course.tolist())))
    return tuple(result)


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
