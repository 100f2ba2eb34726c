"""A comparison as a notebook shows it: warnings, totals, changed layers, and those that only one run has."""

from __future__ import annotations

from gradscope.compare.table import AlignedTable, Field
from gradscope.compare.table import Cell as TextCell
from gradscope.compare.view import WARNING, DiffView
from gradscope.report.fragment import MUTED, SENTENCE, WARN, Cell, box, heading, line, table, text


def to_fragment(view: DiffView) -> str:
    """HTML without script, style sheet or request."""
    parts = [line(f"<b>{text(view.title)}</b>")]
    parts += [line(f'<span style="{MUTED}">{text(name)}</span> {text(words, SENTENCE)}') for name, words in view.header]
    if view.warnings:
        parts.append(line(text(WARNING, SENTENCE), f"color:{WARN};font-weight:600"))
        parts += [line(f"- {text(warning, SENTENCE)}", f"color:{WARN}") for warning in view.warnings]
    for part in view.tables:
        parts += _table(part)
    parts += [line(text(note, SENTENCE), MUTED) for note in view.notes]
    return box(parts)


def _table(part: AlignedTable) -> list[str]:
    head = [Cell(text(field.header), right=field.align == "right") for field in part.fields]
    rows = [[_cell(field, cell) for field, cell in zip(part.fields, row, strict=True)] for row in part.rows]
    return [
        heading(part.title, part.about),
        table(head, rows),
        *(line(text(words, SENTENCE), MUTED) for words in part.after),
    ]


def _cell(field: Field, cell: TextCell) -> Cell:
    words, style = cell
    content = text(words, 80)
    if style in ("strong", "hot", "warm", "own"):
        content = f"<b>{content}</b>"
    # Blanks before a name are its level.
    indent = (len(words) - len(words.lstrip(" "))) // 2
    return Cell(content, right=field.align == "right", muted=style == "dim", indent=indent)
