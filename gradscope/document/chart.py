"""Bytes over the time of a step as two rows of blocks, with the phases under them and the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from gradscope import units
from gradscope.document.glyphs import Glyphs
from gradscope.document.grid import Line
from gradscope.document.parts import Chart

ROWS = 2
_LEAST = 16  # columns below which there is nothing to see
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


def chart_lines(chart: Chart, width: int, marks: Glyphs) -> list[Line]:
    """Graph from 0 to the peak, phases, and a mark under the peak; nothing without room or without time."""
    peak = units.size(chart.peak_bytes)
    columns = width - len(peak) - 1
    if columns < _LEAST or not chart.points or chart.duration_ns <= 0 or chart.peak_bytes <= 0:
        return []
    at = _column(chart.peak_ns, chart.duration_ns, columns)
    heights = highest(chart.points, chart.duration_ns, columns)
    heights[at] = max(heights[at], chart.peak_bytes)
    blocks = _blocks(heights, chart.peak_bytes, marks)
    labels = [peak, *[""] * (ROWS - 2), "0 B"]
    pad = len(peak) + 1
    lines: list[Line] = []
    for label, row in zip(labels, blocks, strict=True):
        lines.append(_trimmed([(f"{label:>{pad - 1}} ", "dim"), (row[:at], ""), (row[at], "hot"), (row[at + 1 :], "")]))
    lines.append(_trimmed([(" " * pad, ""), (marks.text(_ruler(chart, columns)), "dim")]))
    lines.append([(" " * pad, ""), (marks.text(_mark(chart.peak, at, columns)), "")])
    return lines


def highest(points: Sequence[tuple[int, int]], duration_ns: int, columns: int) -> list[int]:
    """Most bytes in each of ``columns`` equal stretches of the step; ``points`` are in order of time."""
    result = [0] * columns
    current, done = points[0][1], 0
    for ns, size in points:
        column = _column(ns, duration_ns, columns)
        inside = ns * columns > column * duration_ns  # else nothing of the column comes before the point
        for i in range(done, column + inside):
            result[i] = max(result[i], current)
        result[column] = max(result[column], size)
        current, done = size, column + 1
    for i in range(done, columns):
        result[i] = current
    return result


def _column(ns: int, duration_ns: int, columns: int) -> int:
    return min(max(ns * columns // duration_ns, 0), columns - 1)


def _blocks(heights: Sequence[int], top: int, marks: Glyphs) -> list[str]:
    """The rows of blocks, highest first; what is more than nothing gets a mark."""
    levels = len(marks.heights)
    rows = [""] * ROWS
    for height in heights:
        steps = min(max(round(height / top * ROWS * levels), 1 if height > 0 else 0), ROWS * levels)
        for row in range(ROWS):
            filled = min(max(steps - (ROWS - 1 - row) * levels, 0), levels)
            rows[row] += marks.heights[filled - 1] if filled else " "
    return rows


def _ruler(chart: Chart, columns: int) -> str:
    """The phases, each from where it starts to where it ends: ``├forward────├backward───``."""
    ruler = [" "] * columns
    for phase, *ends in chart.phases:
        start, end = (min(max(ns * columns // chart.duration_ns, 0), columns) for ns in ends)
        if end <= start or (phase == "other" and end - start <= len("other")):
            continue
        names = (phase, _SHORT.get(phase, phase[:3]), phase[:1], "")
        name = next(name for name in names if len(name) < end - start)
        ruler[start:end] = f"├{name}".ljust(end - start, "─")
    return "".join(ruler)


def _mark(words: str, at: int, columns: int) -> str:
    """``▲`` below the peak, with ``words`` on the side that has room for them."""
    if at + 2 + cell_len(words) <= columns:
        return f"{' ' * at}▲ {words}"
    before = f"{words} " if cell_len(words) < at else ""
    return f"{' ' * (at - cell_len(before))}{before}▲"


def _trimmed(line: Line) -> Line:
    """The line without blanks at its end."""
    while line and not line[-1][0].strip():
        line.pop()
    if line:
        line[-1] = (line[-1][0].rstrip(), line[-1][1])
    return line
