"""A comparison as GitHub-flavoured Markdown, to paste into a pull request."""

from __future__ import annotations

from gradscope.compare.table import AlignedTable
from gradscope.compare.view import WARNING, DiffView
from gradscope.report.markdown import escape


def to_markdown(view: DiffView) -> str:
    """The warnings, the header, every table and the notes; ends in a newline."""
    parts = [f"### {escape(view.title)}"]
    if view.warnings:
        parts.append(f"**{escape(WARNING)}**\n\n" + _list(view.warnings))
    parts.append("\n".join(f"- **{name}**: {escape(text)}" for name, text in view.header))
    parts += [_table(table) for table in view.tables]
    if view.notes:
        parts.append("#### Notes\n\n" + _list(view.notes))
    return "\n\n".join(parts) + "\n"


def _list(items: tuple[str, ...]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def _table(table: AlignedTable) -> str:
    head = [escape(field.header) for field in table.fields]
    rules = ["---" if field.align == "left" else "---:" for field in table.fields]
    rows = [[_cell(text, style) for text, style in row] for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, rules, *rows)]
    return f"#### {escape(table.title)}\n\n{escape(table.about)}\n\n" + "\n".join(lines)


def _cell(text: str, style: str) -> str:
    """Bold where the terminal is: what is real, and the sums."""
    clean = escape(text)
    return f"**{clean}**" if clean.strip() and style in {"hot", "strong"} else clean
