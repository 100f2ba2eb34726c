"""Memory of a run -> what the page reads: columns of numbers, and texts by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from gradscope.report.runfile import to_record
from gradscope.tables import LayerSpan, MemoryInfo, TimelinePoint

TIMELINE_POINTS = 600  # more than the chart has pixels to tell apart
SPANS = 1_500

_TABLES = ("at_peak", "timeline", "phases", "saved", "held", "copies", "retained", "categories", "owners", "spans")
_SAVED_TEXTS = ("line", "node", "what", "shape", "dtype")

Column = Callable[[Iterable[str | None]], list[int]]


def memory_record(memory: MemoryInfo, layer: Column, text: Column) -> dict[str, Any]:
    """``memory`` as the page holds it.

    Args:
        layer: paths of layers -> their numbers, -1 for none.
        text: texts -> their numbers, -1 for ``None``.
    """
    record = {key: value for key, value in to_record(memory).items() if key not in _TABLES}
    record |= {
        "peak_layer": layer([memory.peak_layer])[0],
        "at_peak": {
            "layer": layer(row.owner for row in memory.at_peak),
            "category": text(row.category for row in memory.at_peak),
            "bytes": [row.bytes for row in memory.at_peak],
        },
        "saved": {
            "layer": layer(row.layer for row in memory.saved),
            **{name: text(getattr(row, name) for row in memory.saved) for name in _SAVED_TEXTS},
            "count": [row.count for row in memory.saved],
            "bytes": [row.bytes for row in memory.saved],
        },
        "timeline": _timeline(memory, text),
        "phases": to_record(memory.phases),
    }
    if memory.spans is not None:
        shown = longest(memory.spans, SPANS)
        record["spans"] = _spans(shown, layer, text)
        record["spans_left_out"] = (memory.spans_left_out or 0) + len(memory.spans) - len(shown)
    return record


def _timeline(memory: MemoryInfo, text: Column) -> dict[str, Any]:
    points, categories, owners = memory.timeline, memory.categories, memory.owners
    kept = thin(points, TIMELINE_POINTS)
    record: dict[str, Any] = {"ns": steps([points[i].ns for i in kept]), "bytes": [points[i].bytes for i in kept]}
    if categories is not None:
        record["category"] = text(course.category for course in categories)
        # Most categories are steady for most of the time: steps are shorter than sums.
        record["parts"] = [steps([course.bytes[i] for i in kept]) for course in categories]
    if owners:
        record["owner"] = text(course.owner for course in owners)
        record["owned"] = [steps([course.bytes[i] for i in kept]) for course in owners]
    return record


def _spans(spans: Sequence[LayerSpan], layer: Column, text: Column) -> dict[str, list[int]]:
    return {
        "layer": layer(span.layer for span in spans),
        "phase": text(span.phase for span in spans),
        "start_ns": steps([span.start_ns for span in spans]),
        "ns": [span.end_ns - span.start_ns for span in spans],
    }


def longest(spans: Sequence[LayerSpan], most: int) -> Sequence[LayerSpan]:
    """The ``most`` longest of ``spans``, in the order in which they are given."""
    if len(spans) <= most:
        return spans
    kept = sorted(range(len(spans)), key=lambda i: spans[i].start_ns - spans[i].end_ns)[:most]
    return [spans[i] for i in sorted(kept)]


def steps(values: Sequence[int]) -> list[int]:
    """The first value, and from each value to the next; their running sums are ``values``."""
    result = [value - before for value, before in zip(values, (0, *values), strict=False)]
    assert list(accumulate(result)) == list(values)
    return result


def thin(points: Sequence[TimelinePoint], most: int) -> Sequence[int]:
    """Numbers of at most ``most`` of ``points``, among them the first, the last and the highest.

    The points are cut into runs of equal length, and the lowest and highest of each stay.
    """
    if len(points) <= most:
        return range(len(points))
    length = -(-len(points) // ((most - 2) // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), length):
        run = range(start, min(start + length, len(points)))
        kept |= {min(run, key=lambda i: points[i].bytes), max(run, key=lambda i: points[i].bytes)}
    return sorted(kept)
