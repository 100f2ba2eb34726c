"""Which layer ran when in the measured step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gradscope.attribute.memory.event_owners import NO_PLACE, MemoryTrace, phase_of
from gradscope.attribute.rows import Category
from gradscope.tables import LayerSpan, ModuleInfo

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
    """Stretches of time in which each layer itself ran, in order of time, and how many more were left out.

    At each moment the innermost layer counts; none of the stretches overlap. The longest :data:`MOST_SPANS` stay.
    """
    start, end = trace.start_ns, trace.end_ns
    inside = (Piece(max(p.start, start), min(p.end, end), p.layer, p.phase) for p in _pieces(trace))
    joined = join([p for p in inside if p.start < p.end], (end - start) // _APART)
    longest = sorted(joined, key=lambda piece: piece.start - piece.end)[:MOST_SPANS]
    spans = [LayerSpan(modules[p.layer].path, p.phase, p.start - start, p.end - start) for p in sorted(longest)]
    return tuple(spans), len(joined) - len(spans)


def _pieces(trace: MemoryTrace) -> list[Piece]:
    """What the rows of the step say, thread by thread."""
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
