"""A document as GitHub-flavoured Markdown, to paste into a pull request or an issue.

Bars and charts are for terminals and pages: they are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
from gradscope.safe_text import visible

# What begins a list or underlines a title, at the start of a line.
_LIST = re.compile(r"^(\d*)([-+=.)])(?![^\s=-])")
_INDENT = "&nbsp;&nbsp;&nbsp;"  # leading blanks vanish in a Markdown table
_BOLD = frozenset({"strong", "worse"})


def to_markdown(document: Document) -> str:
    """Return the document as Markdown that ends in a newline."""
    parts = [f"### {escape(document.title)}", escape(document.subject)]
    if document.warning:
        parts.append(f"**{escape(document.warning)}**")
    parts += [_bullets(document.reasons), _block(document.head)]
    parts += [_section(section) for section in document.sections]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> str:
    blocks: list[str] = []
    for block in section.blocks:
        text = _block(block)
        # Entries are items of one list.
        if isinstance(block, Entry) and blocks:
            blocks[-1] += f"\n{text}"
        elif text:
            blocks.append(text)
    if not blocks and section.blocks:
        return ""
    about = "; ".join(filter(None, [section.about, *section.legends]))
    return "\n\n".join([f"#### {escape(section.title)}", *([escape(about)] if about else []), *blocks])


def _block(block: Block) -> str:
    match block:
        case Table():
            return _table(block)
        case KeyValues():
            return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in block.rows)
        case Words():
            text = escape(block.text)
            return f"**{text}**" if block.style in ("strong", "warn") else text
        case Bullets():
            return _bullets(block.items)
        case Entry():
            return _entry(block)
        case Commands():
            return "\n".join(f"- {escape(step.purpose)}: `{_code(step.command)}`" for step in block.steps)
        case Chart():
            return escape(block.peak)


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def _table(table: Table) -> str:
    drawn = {i for row in table.rows for i, cell in enumerate(row.cells) if isinstance(cell, Bar)}
    columns = [(i, column) for i, column in enumerate(table.columns) if i not in drawn]
    if not table.rows:
        return ""
    lines = [
        [escape(column.title) for _, column in columns],
        ["---" if column.align == "left" else "---:" for _, column in columns],
        *([_cell(row, i) for i, _ in columns] for row in table.rows),
    ]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = _bullets([row.note for row in table.rows if row.note])
    return f"{text}\n\n{notes}" if notes else text


def _cell(row: Row, number: int) -> str:
    cell = row.cells[number] if number < len(row.cells) else Cell()
    assert isinstance(cell, Cell)
    text = f"`{_code(cell.text)}`" if cell.code and cell.text else escape(cell.text)
    text += f" {escape(cell.after)}" if cell.after else ""
    bold = text.strip() and (row.kind == "whole" or (cell.style in _BOLD and not cell.code))
    return _INDENT * (len(cell.guides) or cell.level) + (f"**{text}**" if bold else text)


def _entry(entry: Entry) -> str:
    """An item of a numbered list; what belongs to it is indented as far as its text."""
    lead = f"{entry.number}. "
    indent = " " * len(lead)
    text = f"**{escape(entry.label)}**: {escape(entry.text)}" if entry.label else escape(entry.text)
    brief = f" *{escape(' · '.join(entry.brief))}*" if entry.brief else ""
    # A break at the end of each line but the last: each stands on its own.
    lines = [f"{text}{brief}", *(_fact(fact) for fact in entry.facts if fact.kind != "code")]
    blocks = "".join(_fenced(fact.text, indent) for fact in entry.facts if fact.kind == "code")
    return lead + f"  \n{indent}".join(line for line in lines if line) + blocks


def _fact(fact: Fact) -> str:
    if fact.kind == "source":
        return f"`{_code(fact.text)}`"
    if fact.kind == "names":
        return " · ".join(f"`{_code(name)}`" for name in fact.text.split(" · "))
    text = escape(fact.text)
    return f"{fact.label}: {f'*{text}*' if fact.style == 'strong' else text}"


def _fenced(code: str, indent: str) -> str:
    """A block of code, fenced so that no backticks in it end it."""
    fence = "```"
    while fence in code:
        fence += "`"
    lines = [f"{fence}python", *map(visible, code.splitlines()), fence]
    return "\n\n" + "\n".join(f"{indent}{line}" for line in lines)


def escape(text: str) -> str:
    """``text`` as it is, on one line: nothing in it is Markdown, HTML or a link, or hides or turns what follows."""
    flat = visible(" ".join(text.split()))
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = "".join(f"\\{char}" if char in "\\`*_[]|~#" else char for char in flat)
    flat = flat.replace("://", "&#58;//").replace("www.", "www&#46;")
    return _LIST.sub(r"\1\\\2", flat)


def _code(text: str) -> str:
    """``text`` for use between backticks in a table's cell."""
    flat = visible(" ".join(text.split())).replace("`", "'")
    # Behind a backslash a bar ends the cell, however it is escaped.
    return flat.replace("\\|", "\\ |").replace("|", "\\|")
