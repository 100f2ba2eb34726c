"""A fit on a terminal, in a file, or as a string, in the shapes of the profile's report."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.fitting.growth import folded_growth
from gradscope.fitting.messages import check_text, header_rows, largest_text, notes_of
from gradscope.fitting.result import FitData, FitRow
from gradscope.report import glyphs as glyph_sets
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line
from gradscope.report.style import heading, heat, share_bar, wrapped
from gradscope.report.terminal import DEFAULT_WIDTH, print_lines

if TYPE_CHECKING:
    from rich.console import Console

_TOP_LAYERS = 10


def print_fit(data: FitData, console: Console | None = None) -> None:
    """Print on ``console``, or on one made for stdout."""
    print_lines(lambda width, marks: fit_lines(data, width, marks), console)


def to_text(data: FitData, width: int = DEFAULT_WIDTH, encoding: str = "utf-8") -> str:
    """The report as plain text of at most ``width`` columns, without colour."""
    out = io.StringIO()
    for line in fit_lines(data, width, glyph_sets.for_encoding(encoding)):
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    return out.getvalue()


def fit_lines(data: FitData, width: int, marks: Glyphs) -> list[Line]:
    """The whole report as lines of styled pieces."""
    lines: list[Line] = [[(marks.text(f"gradscope {data.gradscope}"), "title")]]
    rows = header_rows(data)
    pad = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        lines += wrapped(text, width, marks, first=name.ljust(pad))
    for section in (_sizes, _layers, _notes):
        body = section(data, width, marks)
        if body:
            lines += [[], *body]
    return lines


def _sizes(data: FitData, width: int, marks: Glyphs) -> list[Line]:
    ranged = any(row.low_bytes is not None for row in data.rows)
    judged = data.device_memory_bytes is not None
    grid = Grid(
        [
            Column("batch size"),
            Column("peak"),
            *([Column("range")] if ranged else []),
            *([Column("fits", "left")] if judged else []),
            Column("saved", drop=1),
            Column("model", drop=2),
            Column("rest", drop=3),
            Column("fake tensors", "left", drop=4),
        ]
    )
    for row in data.rows:
        _size_row(grid, row, marks, ranged=ranged, judged=judged)
    about = "predicted for one step = saved for backward + model, gradients, optimizer + rest"
    lines = [heading("Peak memory", about, width, marks), *grid.lines(width, marks)]
    if judged:
        lines += wrapped(largest_text(data), width, marks, style="strong")
    return lines


def _size_row(grid: Grid, row: FitRow, marks: Glyphs, *, ranged: bool, judged: bool) -> None:
    accent = {"no": "hot", "unsure": "warm"}.get(row.fits or "", "")
    cells: list[Line] = [[(str(row.batch_size), "strong")], [(units.size(row.peak_bytes), accent)]]
    if ranged:
        between = "" if row.low_bytes is None else f"{units.size(row.low_bytes)} to {units.size(row.high_bytes)}"
        cells.append([(between, "dim")])
    if judged:
        cells.append([(row.fits or "", accent)])
    cells += [[(units.size(value), "")] for value in (row.saved_bytes, row.model_bytes, row.rest_bytes)]
    grid.row(*cells, [(marks.text(check_text(row)), "warn" if row.check == "corrected" else "dim")])


def _layers(data: FitData, width: int, marks: Glyphs) -> list[Line]:
    grown = folded_growth(data.layers, data.model)
    whole = sum(item.bytes for item in grown) + data.outside_bytes_per_sample
    if whole <= 0:
        return []
    grid = Grid(
        [
            Column("layer", "left", least=24, most=56, cut="front"),
            Column("class", "left", drop=3, least=9, most=22),
            Column("a sample"),
            Column("share"),
            Column("", "left", drop=1, least=10, most=20),
            Column("layers", drop=2),
        ]
    )
    for item in grown[:_TOP_LAYERS]:
        share = item.bytes / whole
        grid.row(
            [(marks.text(item.address), "")],
            [(marks.text(item.class_name), "dim")],
            [(units.size(item.bytes), heat(share))],
            [(units.percent(share), heat(share))],
            share_bar(share, marks),
            [(str(item.layers), "")],
        )
    others = grown[_TOP_LAYERS:]
    rest = (
        (f"… {len(others)} more", sum(item.bytes for item in others)),
        ("outside the layers", data.outside_bytes_per_sample),
    )
    for label, amount in rest:
        if amount:
            share = amount / whole
            texts = (label, "", units.size(amount), units.percent(share))
            grid.row(*([(marks.text(text), "dim")] for text in texts), share_bar(share, marks), [])
    about = f"saved for backward by the last sample of {data.growth_at}: {units.size(whole)}"
    return [heading("What grows", about, width, marks), *grid.lines(width, marks)]


def _notes(data: FitData, width: int, marks: Glyphs) -> list[Line]:
    notes = list(notes_of(data))
    if not notes:
        return []
    lines = [heading("Notes", "what was not measured or is an estimate, and why", width, marks)]
    for note in notes:
        lines += wrapped(note, width, marks, first="- ")
    return lines
