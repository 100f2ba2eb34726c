"""A document on a terminal, in a file, or as a string.

Nothing is said by colour alone, and nothing is written that the output's encoding cannot hold.
"""

from __future__ import annotations

import io
import os
import sys
from typing import IO, TYPE_CHECKING

from gradscope.document import glyphs as glyph_sets
from gradscope.document.chart import chart_lines
from gradscope.document.glyphs import Glyphs
from gradscope.document.grid import Cell as GridCell
from gradscope.document.grid import Column as GridColumn
from gradscope.document.grid import Grid, Line, cut_line, width_of
from gradscope.document.parts import (
    Bar,
    Block,
    Bullets,
    Cell,
    Chart,
    Commands,
    Document,
    Entry,
    Fact,
    KeyValues,
    Row,
    Section,
    Table,
    Words,
)
from gradscope.document.style import STYLES, wrapped

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_WIDTH = 100
MAX_WIDTH = 160  # beyond it numbers are too far from their names
_LABEL = 7  # characters of the longest label of a fact, and the blank behind it
_LEAST_TEXT = 24  # characters of an entry's text that are left before what is behind it on its line


def print_document(document: Document, console: Console | None = None) -> None:
    """Print on ``console``, or on one made for stdout by :func:`make_console`."""
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = console or make_console()
    marks = glyph_sets.for_encoding(console.encoding)
    styles = {name: Style.parse(text) for name, text in STYLES.items()}
    segments: list[Segment] = []
    for line in document_lines(document, min(console.width, MAX_WIDTH), marks):
        segments.extend(Segment(text, styles.get(style)) for text, style in line)
        segments.append(Segment.line())
    console.print(Segments(segments), end="", soft_wrap=True)


def make_console(file: IO[str] | None = None, color: bool | None = None) -> Console:
    """A console on ``file`` (default stdout).

    As wide as the terminal; :data:`DEFAULT_WIDTH` where there is none, or less if what is piped will most likely be
    read in a narrower terminal (a pager); ``COLUMNS`` overrules all. ``color`` is ``None`` for "if it is a terminal
    and ``NO_COLOR`` is not set".
    """
    from rich.console import Console

    file = sys.stdout if file is None else file
    columns = os.environ.get("COLUMNS", "")
    terminal = file.isatty()
    width = (
        int(columns)
        if columns.isdecimal() and len(columns) < 6 and int(columns) > 0
        else None
        if terminal
        else _piped_width()
    )
    return Console(
        file=file,
        width=width,
        force_terminal=terminal if color is None else color,
        no_color=None if color is None else not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def _piped_width() -> int:
    try:
        return min(DEFAULT_WIDTH, os.get_terminal_size(2).columns or DEFAULT_WIDTH)
    except OSError:  # stderr is no terminal either
        return DEFAULT_WIDTH


def to_text(document: Document, width: int = DEFAULT_WIDTH, encoding: str = "utf-8") -> str:
    """Return the document as plain text of at most ``width`` columns, without colour; only commands are longer."""
    out = io.StringIO()
    for line in document_lines(document, width, glyph_sets.for_encoding(encoding)):
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    return out.getvalue()


def document_lines(document: Document, width: int, marks: Glyphs) -> list[Line]:
    """Return the whole document as lines of styled pieces."""
    lines = _titled(document.title, document.subject, width, marks, about_style="")
    if document.warning:
        lines += wrapped(document.warning, width, marks, style="warn")
    for reason in document.reasons:
        lines += wrapped(reason, width, marks, first="- ", style="warn")
    lines += _block_lines(document.head, width, marks)
    for section in document.sections:
        if body := _section_lines(section, width, marks):
            lines += [[], *body]
    return lines


def _section_lines(section: Section, width: int, marks: Glyphs) -> list[Line]:
    body = [line for block in section.blocks for line in _block_lines(block, width, marks)]
    if not body and section.blocks:  # a chart without room, say
        return []
    has_bars = any(style in ("own", "below") for line in body for _, style in line)
    legends = [
        legend for block in section.blocks if isinstance(block, Table) for legend in _legends(block, width, marks)
    ]
    about = [section.about, section.bars if has_bars else "", *legends]
    return [*_titled(section.title, "; ".join(filter(None, about)), width, marks), *body]


def _titled(title: str, about: str, width: int, marks: Glyphs, about_style: str = "dim") -> list[Line]:
    """A title, and what it is about beside it, in several lines where that is long."""
    title = marks.text(title)
    if not about:
        return [[(title, "title")]]
    first, *rest = wrapped(about, width, marks, first=f"{title}  ", style=about_style)
    return [[(first[0][0], "title"), *first[1:]], *rest]


def _block_lines(block: Block, width: int, marks: Glyphs) -> list[Line]:
    match block:
        case Table():
            return _table_lines(block, width, marks)
        case KeyValues():
            return _pairs(block, width, marks)
        case Words():
            return wrapped(block.text, width, marks, style=block.style)
        case Bullets():
            return [line for item in block.items for line in wrapped(item, width, marks, first="- ", style=block.style)]
        case Entry():
            return _entry_lines(block, width, marks)
        case Commands():
            return _command_lines(block, width, marks)
        case Chart():
            return chart_lines(block, width, marks)


def _pairs(block: KeyValues, width: int, marks: Glyphs) -> list[Line]:
    pad = max((len(name) for name, _ in block.rows), default=0) + 2
    return [line for name, text in block.rows for line in wrapped(text, width, marks, first=name.ljust(pad))]


def _legends(table: Table, width: int, marks: Glyphs) -> list[str]:
    """What the columns mean that have room."""
    if not table.legends:
        return []
    grid = _grid(table, width, marks)
    kept = [id(column) for column in grid.kept(width)]
    shown = zip(table.columns, grid.columns, strict=True)
    return [column.legend for column, drawn in shown if column.legend and id(drawn) in kept]


def _table_lines(table: Table, width: int, marks: Glyphs) -> list[Line]:
    return _grid(table, width, marks).lines(width, marks)


def _grid(table: Table, width: int, marks: Glyphs) -> Grid:
    grid = Grid(
        [
            GridColumn(marks.text(each.title), each.align, each.drop, each.least, each.cut, each.most)
            for each in table.columns
        ]
    )
    for row in table.rows:
        cells = [_cell(cell, marks) for cell in row.cells]
        grid.row(*cells, *([] for _ in range(len(table.columns) - len(cells))))
        for line in _note_lines(row, width, marks):
            grid.span(line)
    return grid


def _cell(cell: Cell | Bar, marks: Glyphs) -> GridCell:
    if isinstance(cell, Bar):
        bar = cell

        def draw(width: int) -> Line:
            solid, light = marks.bar(bar.own, bar.total, width)
            return [(solid, "own"), (light, "below")]

        return draw
    text: Line = [(marks.text(cell.text + cell.after), cell.style)]
    if cell.guides:
        above = "".join("   " if last else marks.pipe for last in cell.guides[:-1])
        return [(above + (marks.corner if cell.guides[-1] else marks.tee), "dim"), *text]
    return [("  " * cell.level, ""), *text] if cell.level else text


def _note_lines(row: Row, width: int, marks: Glyphs) -> list[Line]:
    """What is said below a row: below a name of a tree, where what is below the layer stands."""
    if not row.note:
        return []
    first = row.cells[0]
    if isinstance(first, Cell) and (first.guides or row.note_style == "warn"):
        under = "".join("   " if last else marks.pipe for last in first.guides)
        return [[(under, "dim"), (marks.text(f"^ {row.note}"), row.note_style)]]
    return [[("  ", ""), *line] for line in wrapped(row.note, width - 2, marks, style=row.note_style)]


def _entry_lines(entry: Entry, width: int, marks: Glyphs) -> list[Line]:
    lead = f"{entry.number}. {entry.label}: " if entry.label else f"{entry.number}. "
    if not entry.facts:
        return [_entry_line(lead, entry, width, marks)]
    lines = wrapped(entry.text, width, marks, first=lead, style=entry.style)
    for fact in entry.facts:
        lines += _fact_lines(fact, width, marks)
    return lines


def _entry_line(lead: str, entry: Entry, width: int, marks: Glyphs) -> Line:
    """The entry on one line: what is behind the text gives way before the text is cut."""
    text = marks.text(entry.text)
    tails = [marks.text("  " + " · ".join(entry.brief[i:])) for i in range(len(entry.brief))]
    taken = len(lead) + width_of([(text, "")])
    tail = next((each for each in tails if taken + width_of([(each, "")]) <= width), tails[-1] if tails else "")
    room = width - len(lead) - width_of([(tail, "")])
    if room < _LEAST_TEXT:
        tail, room = "", width - len(lead)
    return [(lead, "dim"), (marks.cut(text, room), entry.style), (tail, "strong")]


def _fact_lines(fact: Fact, width: int, marks: Glyphs) -> list[Line]:
    label = f"   {fact.label:<{_LABEL}}"
    if fact.kind == "code":  # for copying: never cut
        return [[(" " * len(label), ""), (marks.text(line), "command")] for line in fact.text.splitlines()]
    if fact.kind == "source":
        return [cut_line([(" " * len(label), ""), (marks.text(fact.text), "dim")], width, marks)]
    return wrapped(fact.text, width, marks, first=label, style=fact.style)


def _command_lines(block: Commands, width: int, marks: Glyphs) -> list[Line]:
    """Commands one below the other, never cut, with what for beside them where there is room, else below."""
    lines: list[Line] = []
    widest = max(width_of([(marks.text(step.command), "")]) for step in block.steps)
    beside = widest + max(len(step.purpose) for step in block.steps) + 4 <= width
    for step in block.steps:
        command, purpose = marks.text(step.command), marks.text(step.purpose)
        if beside:
            pad = " " * (widest - width_of([(command, "")]))
            lines.append([("  ", ""), (command, "command"), (f"{pad}  {purpose}", "dim")])
        else:
            lines += [[("  ", ""), (command, "command")], [("    ", ""), (purpose, "dim")]]
    return lines
