"""Columns of text that fit a width: shrink what may shrink, then drop the least important column, and again.

A line is a list of (text, style name) pieces; only the terminal knows what a style looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rich.cells import cell_len

from gradscope.document.glyphs import Glyphs

Piece: TypeAlias = tuple[str, str]
Line: TypeAlias = list[Piece]
# A cell is ready text, or drawn once the width of its column is known (bars).
Cell: TypeAlias = Line | Callable[[int], Line]

GAP = 2


@dataclass(slots=True)
class Column:
    """One column: a header and a cell for each row."""

    header: str
    align: Literal["left", "right"] = "right"
    drop: int = 0  # the highest is dropped first; 0 is never dropped
    least: int | None = None  # may be cut or drawn down to this width; None: as wide as its cells, never cut
    cut: Literal["end", "front"] = "end"  # a path or a place is told apart by its end: cut its beginning
    most: int | None = None  # width of cells that are drawn, or the largest width wanted
    cells: list[Cell] = field(default_factory=list)
    measured: tuple[int, int] = (-1, 0)  # number of cells when it was last measured, and the width found

    def natural(self) -> int:
        """The width at which nothing is cut."""
        if self.measured[0] != len(self.cells):
            self.measured = (len(self.cells), self._measure())
        return self.measured[1]

    def _measure(self) -> int:
        texts = [width_of(cell) for cell in self.cells if not callable(cell)]
        widest = max([cell_len(self.header), *texts])
        if any(callable(cell) for cell in self.cells):
            widest = max(widest, self.most or 0)
        return min(widest, self.most) if self.most is not None else widest

    def smallest(self) -> int:
        """The width below which the column is dropped."""
        natural = self.natural()
        return natural if self.least is None else min(natural, max(self.least, cell_len(self.header)))


@dataclass(slots=True)
class Grid:
    """Rows of cells under columns, with lines in between that span all of them."""

    columns: list[Column]
    spans: dict[int, list[Line]] = field(default_factory=dict)  # lines after so many rows

    def row(self, *cells: Cell) -> None:
        """Add one row: a cell for every column."""
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(cell)

    def span(self, line: Line) -> None:
        """Add a line across all columns, below the last row."""
        self.spans.setdefault(len(self.columns[0].cells), []).append(line)

    def kept(self, width: int) -> list[Column]:
        """The columns that have room in ``width`` cells."""
        return _fit(self.columns, width)

    def lines(self, width: int, glyphs: Glyphs) -> list[Line]:
        """The grid in at most ``width`` cells."""
        kept = self.kept(width)
        widths = _widths(kept, width)
        result: list[Line] = []
        if any(column.header for column in kept):
            result.append(
                _join([_place([(c.header, "head")], c, w, glyphs) for c, w in zip(kept, widths, strict=True)])
            )
        for i in range(len(self.columns[0].cells) + 1):
            if i:
                result.append(
                    _join([_place(_drawn(c.cells[i - 1], w), c, w, glyphs) for c, w in zip(kept, widths, strict=True)])
                )
            result.extend(cut_line(line, width, glyphs) for line in self.spans.get(i, ()))
        return result


def width_of(line: Line) -> int:
    """Cells that the line takes."""
    return sum(cell_len(text) for text, _ in line)


def cut_line(line: Line, width: int, glyphs: Glyphs) -> Line:
    """The line in at most ``width`` cells, styles kept."""
    if width_of(line) <= width:
        return line
    result: Line = []
    left = width
    for k, (text, style) in enumerate(line):
        rest = width_of(line[k + 1 :])
        size = cell_len(text)
        if size + (min(rest, 1) and len(glyphs.ellipsis)) > left:
            result.append(
                (glyphs.cut(text, left) if size > left else glyphs.cut(text + glyphs.ellipsis * 2, left), style)
            )
            break
        result.append((text, style))
        left -= size
    return result


def _fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Drop columns, highest ``drop`` first, until the rest fits at its smallest."""
    kept = [column for column in columns if column.cells]
    while sum(c.smallest() for c in kept) + GAP * (len(kept) - 1) > width:
        droppable = [column for column in kept if column.drop > 0]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda column: column.drop))
    return kept


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Smallest widths, and what is left over given from left to right."""
    widths = [column.smallest() for column in columns]
    left = width - sum(widths) - GAP * (len(widths) - 1)
    for i, column in enumerate(columns):
        if left < 0 and column.least is not None:  # nothing more to drop: cut this one below its smallest
            extra = max(left, 4 - widths[i])
        else:
            extra = min(max(left, 0), column.natural() - widths[i])
        widths[i] += extra
        left -= extra
    return widths


def _drawn(cell: Cell, width: int) -> Line:
    return cell(width) if callable(cell) else cell


def _place(line: Line, column: Column, width: int, glyphs: Glyphs) -> Line:
    line = cut_line(line, width, glyphs) if column.cut == "end" else _cut_front(line, width, glyphs)
    pad = " " * (width - width_of(line))
    return [(pad, ""), *line] if column.align == "right" else [*line, (pad, "")]


def _cut_front(line: Line, width: int, glyphs: Glyphs) -> Line:
    if width_of(line) <= width or not line:
        return line
    text, style = "".join(text for text, _ in line), line[-1][1]
    while text and cell_len(text) + len(glyphs.ellipsis) > width:
        text = text[1:]
    return [(glyphs.ellipsis + text, style)]


def _join(cells: list[Line]) -> Line:
    """Cells with gaps between them, and no blanks at the end."""
    line: Line = []
    for i, cell in enumerate(cells):
        if i:
            line.append((" " * GAP, ""))
        line.extend(cell)
    while line and not line[-1][0].strip():
        line.pop()
    if line:
        line[-1] = (line[-1][0].rstrip(), line[-1][1])
    return [piece for piece in line if piece[0]]
