"""The measured step over time: what was allocated when, of which category, and which layer ran."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gradscope.attribute.memory.blocks import Blocks
from gradscope.attribute.memory.classify import Classified, backward_windows
from gradscope.attribute.memory.event_owners import NO_PLACE, MemoryTrace, phase_of
from gradscope.attribute.memory.step import Running
from gradscope.attribute.rows import Category
from gradscope.tables import (
    CategoryCourse,
    IntColumn,
    LayerSpan,
    MemoryCategory,
    ModuleInfo,
    OwnerCourse,
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


MOST_OWNERS = 24
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def owners_of(
    running: Running, blocks: Blocks, classified: Classified, paths: Sequence[str], entries: IntColumn
) -> tuple[OwnerCourse, ...]:
    """The running total at ``entries`` by owner, repeats as one, of the :data:`MOST_OWNERS` that hold most at any.

    Args:
        paths: of the modules.
    """
    above = {path[: match.start()] for path in paths for match in re.finditer(r"\.", path)}
    names = [None, *(_folded(path, above) for path in paths)]
    groups = list(dict.fromkeys(names))
    group_of = np.array([groups.index(name) for name in names], np.int64)[classified.layer + 1]
    count, alive = len(running.total), classified.block
    first = np.clip(blocks.born[alive] - running.first + 1, 0, count)
    last = np.minimum(blocks.died[alive], running.first + count) - running.first + 1
    change = np.zeros((len(groups), len(entries) + 1), np.int64)
    np.add.at(change, (group_of, np.searchsorted(entries, first)), blocks.bytes[alive])
    np.subtract.at(change, (group_of, np.searchsorted(entries, last)), blocks.bytes[alive])
    courses = np.cumsum(change, axis=1)[:, :-1]
    most = courses.max(axis=1, initial=0)
    largest = [index for index in np.argsort(-most, kind="stable")[:MOST_OWNERS].tolist() if most[index] > 0]
    return tuple(OwnerCourse(groups[index], tuple(courses[index].tolist())) for index in largest)


def _folded(path: str, above: Container[str]) -> str:
    """``path`` with a "*" for each number that names a block: as in the report, what holds no layer is no repeat."""
    return _NUMBER.sub(lambda match: "*" if path[: match.end()] in above else match[0], path)


def phases_of(trace: MemoryTrace) -> tuple[PhaseSpan, ...]:
    """Return forward, backward and optimizer as stretches of the measured step, and what lies between as "other"."""
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


MOST_SPANS = 2_000
# Stretches that are less than this part of the step apart are one: the engine's own time between two nodes of a layer
# does not part them.
_APART = 500
_PHASES = ("forward", "backward", "recompute")


class Piece(NamedTuple):
    """A stretch of time of one layer in one phase; layer -1 for none."""

    start: int
    end: int
    layer: int
    phase: str


def spans_of(trace: MemoryTrace, modules: Sequence[ModuleInfo]) -> tuple[tuple[LayerSpan, ...], int]:
    """Return the stretches of time in which each layer itself ran, in order of time, and how many more were left out.

    At each moment the innermost layer counts; none of the stretches overlap. The longest :data:`MOST_SPANS` stay.
    """
    start, end = trace.start_ns, trace.end_ns
    inside = (Piece(max(p.start, start), min(p.end, end), p.layer, p.phase) for p in _pieces(trace))
    joined = join([p for p in inside if p.start < p.end], (end - start) // _APART)
    longest = sorted(joined, key=lambda piece: piece.start - piece.end)[:MOST_SPANS]
    spans = [LayerSpan(modules[p.layer].path, p.phase, p.start - start, p.end - start) for p in sorted(longest)]
    return tuple(spans), len(joined) - len(spans)


def _pieces(trace: MemoryTrace) -> list[Piece]:
    """Return what the rows of the step say, thread by thread."""
    table, assigned = trace.table, trace.assigned
    rows = np.arange(len(table))
    category = assigned.rows.category.astype(np.int64)
    phases = np.array([_PHASES.index(phase_of(c)) if phase_of(c) in _PHASES else NO_PLACE for c in Category])
    owner, phase = trace.owner(rows), phases[category]
    key = np.where((owner >= 0) & (phase >= 0), owner * len(_PHASES) + phase, NO_PLACE)
    above = np.where(table.parent >= 0, key[table.parent], NO_PLACE)
    # Only rows that differ from what they are in start or end a stretch.
    rows = np.flatnonzero((key != above) & (assigned.steps.of_row == 0))
    found: list[Piece] = []
    for thread in np.unique(table.thread[rows]).tolist():
        mine = rows[table.thread[rows] == thread]
        columns = (table.start_ns[mine], table.end_ns[mine], key[mine])
        found += [
            Piece(low, high, number // len(_PHASES), _PHASES[number % len(_PHASES)])
            for low, high, number in flatten(zip(*(column.tolist() for column in columns), strict=True))
            if number >= 0
        ]
    return found


def flatten(rows: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Nested intervals (start, end, key) of one thread, each before those in it -> the innermost at each moment."""
    around: list[tuple[int, int]] = []  # end and key of what is open
    at = 0
    for start, end, key in rows:
        while around and around[-1][0] <= start:
            closed, mine = around.pop()
            if at < closed:
                yield at, closed, mine
            at = max(at, closed)
        if around and at < start:
            yield at, start, around[-1][1]
        at = start
        around.append((end, key))
    while around:
        closed, mine = around.pop()
        if at < closed:
            yield at, closed, mine
        at = max(at, closed)


def join(pieces: Sequence[Piece], apart: int) -> list[Piece]:
    """The pieces in order of time, without overlaps, those of one layer and phase joined that are at most ``apart``.

    Where threads ran at the same time, the one that began first counts until it ends.
    """
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if last is not None and piece.end <= last.end:
            continue
        if last is not None and (piece.layer, piece.phase) == last[2:] and piece.start - last.end <= apart:
            joined[-1] = last._replace(end=piece.end)
        else:
            start = piece.start if last is None else max(piece.start, last.end)
            joined.append(piece._replace(start=start))
    assert all(one.end <= other.start for one, other in pairwise(joined))
    return joined
