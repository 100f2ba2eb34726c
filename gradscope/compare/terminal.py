"""A comparison on a terminal or as plain text, in the looks of the report."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from gradscope.compare.table import AlignedTable
from gradscope.compare.view import WARNING, DiffView
from gradscope.report import glyphs as glyph_sets
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line
from gradscope.report.style import heading, titled, wrapped
from gradscope.report.terminal import DEFAULT_WIDTH, print_lines

if TYPE_CHECKING:
    from rich.console import Console


def print_diff(view: DiffView, console: Console | None = None) -> None:
    """Print on ``console``, by default on stdout."""
    print_lines(lambda width, marks: diff_lines(view, width, marks), console)


def to_text(view: DiffView, width: int = DEFAULT_WIDTH, encoding: str = "utf-8") -> str:
    """The comparison as plain text of at most ``width`` columns, without colour."""
    return plain(diff_lines(view, width, glyph_sets.for_encoding(encoding)))


def plain(lines: list[Line]) -> str:
    """Lines without their styles."""
    out = io.StringIO()
    for line in lines:
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    return out.getvalue()


def diff_lines(view: DiffView, width: int, marks: Glyphs) -> list[Line]:
    """The whole comparison as lines of styled pieces."""
    lines: list[Line] = [[(marks.text(view.title), "title")]]
    lines += warning_lines(view.warnings, width, marks)
    pad = max(len(name) for name, _ in view.header) + 2
    for name, text in view.header:
        lines += wrapped(marks.text(text), width, marks, first=name.ljust(pad))
    for table in view.tables:
        lines += [[], *table_lines(table, width, marks)]
    if view.notes:
        lines += [[], heading("Notes", "what could not be compared, and why", width, marks)]
        for note in view.notes:
            lines += wrapped(marks.text(note), width, marks, first="- ")
    return lines


def warning_lines(warnings: tuple[str, ...], width: int, marks: Glyphs) -> list[Line]:
    """Why the runs may not be comparable, one reason after the other."""
    if not warnings:
        return []
    lines = wrapped(WARNING, width, marks, style="warn")
    for warning in warnings:
        lines += wrapped(marks.text(warning), width, marks, first="- ", style="warn")
    return lines


def table_lines(table: AlignedTable, width: int, marks: Glyphs) -> list[Line]:
    """A heading, and the table in as many columns as fit."""
    grid = Grid(
        [
            Column(marks.text(field.header), field.align, field.drop, field.least, field.cut, field.most)
            for field in table.fields
        ]
    )
    for row in table.rows:
        grid.row(*([(marks.text(text), style)] for text, style in row))
    return [*titled(table.title, table.about, width, marks), *grid.lines(width, marks)]
