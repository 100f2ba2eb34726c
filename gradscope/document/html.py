"""A document as a piece of HTML for a notebook's cell: inline styles, and text that stays text.

Notebooks strip scripts and often style sheets, and typeset what stands between dollars. So all styles are inline,
colours are the notebook's own or legible on any background, and what could be markup is broken up.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from gradscope.document import glyphs
from gradscope.document.parts import (
    Bar,
    Block,
    Bullets,
    Cell,
    Chart,
    Column,
    Commands,
    Document,
    Entry,
    Fact,
    KeyValues,
    Row,
    Section,
    Style,
    Table,
    Words,
)

MUTED = "opacity:.75"
WARN = "#d0651b"  # on white and on black alike at least 3.9:1; what it marks says it in words too
_OWN, _BELOW = "#e0813a", "#8a909a"
_BOX = "font:13px/1.45 system-ui,sans-serif;color:inherit;text-align:left;overflow-x:auto;overflow-wrap:anywhere"
_CELL = "padding:1px 8px 1px 0;border:0;white-space:nowrap"
# What begins and ends mathematics for MathJax: in an element of its own it does neither.
_MATH = re.compile(r"[$\\]")
_NAME = 80  # characters of a name
_SENTENCE = 400
_STYLES: dict[Style, str] = {"dim": MUTED, "warn": f"color:{WARN};font-weight:600"}
_BOLD = frozenset({"strong", "hot", "warm", "worse"})


def to_fragment(document: Document) -> str:
    """Return HTML without script, style sheet or request. The classes keep MathJax off where it looks for them."""
    subject = f" · {text(document.subject, _SENTENCE)}" if document.subject else ""
    parts = [_line(f"<b>{text(document.title)}</b>{subject}")]
    if document.warning:
        parts.append(_line(text(document.warning, _SENTENCE), _STYLES["warn"]))
    parts += [_line(f"- {text(reason, _SENTENCE)}", _STYLES["warn"]) for reason in document.reasons]
    parts += _block(document.head)
    for section in document.sections:
        parts += _section(section)
    return f'<div class="gradscope tex2jax_ignore mathjax_ignore" style="{_BOX}">{"".join(parts)}</div>'


def text(raw: str, most: int = _NAME) -> str:
    """Text from outside as HTML: on one line, control characters made visible, cut, and no markup of any kind."""
    shown = glyphs.for_encoding("utf-8").text(raw)
    if len(shown) > most:
        front = (most - 1) // 2
        shown = f"{shown[:front]}…{shown[len(shown) - (most - 1 - front) :]}"
    return _MATH.sub(lambda match: f"<span>{match[0]}</span>", html.escape(shown))


def bar(own: float, total: float) -> str:
    """A bar for shares 0..1: strong for ``own``, light for the rest of ``total``."""
    solid = min(max(own, 0.0), 1.0)
    light = min(max(total - solid, 0.0), 1.0 - solid)
    parts = "".join(
        f'<span style="display:inline-block;height:9px;width:{part * 100:.1f}%;background:{colour}"></span>'
        for part, colour in ((solid, _OWN), (light, f"{_BELOW};opacity:.5"))
        if part >= 0.0005
    )
    return f'<div style="width:120px;font-size:0;line-height:9px;white-space:nowrap">{parts}</div>'


def _line(content: str, style: str = "") -> str:
    return f'<div style="{style}">{content}</div>' if style else f"<div>{content}</div>"


def _section(section: Section) -> list[str]:
    body = [part for block in section.blocks for part in _block(block)]
    if not body and section.blocks:
        return []
    words = "; ".join(filter(None, [section.about, section.bars, *section.legends]))
    about = f' <span style="font-weight:normal;{MUTED}">{text(words, _SENTENCE)}</span>' if words else ""
    return [f'<div style="font-weight:600;margin-top:6px">{text(section.title)}{about}</div>', *body]


def _block(block: Block) -> list[str]:
    match block:
        case Table():
            return [_table(block)]
        case KeyValues():
            return [
                _line(f'<span style="{MUTED}">{text(name)}</span> {text(words, _SENTENCE)}')
                for name, words in block.rows
            ]
        case Words():
            return [_line(_styled(text(block.text, _SENTENCE), block.style), _STYLES.get(block.style, ""))]
        case Bullets():
            return [_line(f"- {text(item, _SENTENCE)}", _STYLES.get(block.style, "")) for item in block.items]
        case Entry():
            return list(_entry(block))
        case Commands():
            return [
                _line(f"{text(step.purpose)}: <code>{text(step.command, _SENTENCE)}</code>") for step in block.steps
            ]
        case Chart():
            return [_line(text(block.peak))]


def _styled(content: str, style: str) -> str:
    return f"<b>{content}</b>" if style in _BOLD else content


def _entry(entry: Entry) -> Iterator[str]:
    label = f"{entry.label}: " if entry.label else ""
    head = f"<b>{text(f'{entry.number}. {label}{entry.text}', _SENTENCE)}</b>"
    brief = f" {text(' · '.join(entry.brief), _SENTENCE)}" if entry.brief else ""
    yield _line(head + brief, f"color:{WARN}" if entry.style in ("hot", "warn") and not brief else "")
    for fact in entry.facts:
        if content := _fact(fact):
            yield _line(content, "padding-left:14px")


def _fact(fact: Fact) -> str:
    content = text(fact.text, _SENTENCE)
    if not content:
        return ""
    if fact.kind in ("source", "code"):
        return f"<code>{content}</code>"
    return f'<span style="{MUTED}">{text(fact.label)}</span> {_styled(content, fact.style)}'


def _table(table: Table) -> str:
    top = "".join(_cell(Cell(column.title), column, "th") for column in table.columns)
    body = "".join(f'<tr style="background:none">{_row(row, table)}</tr>{_note(row, table)}' for row in table.rows)
    return (
        f'<table style="border-collapse:collapse;border:0;margin:4px 0;color:inherit;font-size:13px"><thead>'
        f'<tr style="background:none">{top}</tr></thead><tbody>{body}</tbody></table>'
    )


def _row(row: Row, table: Table) -> str:
    cells = [*row.cells, *(Cell() for _ in table.columns[len(row.cells) :])]
    return "".join(_cell(cell, column) for cell, column in zip(cells, table.columns, strict=True))


def _note(row: Row, table: Table) -> str:
    if not row.note:
        return ""
    first = row.cells[0]
    level = len(first.guides) + 1 if isinstance(first, Cell) else 1
    style = f"{_CELL};padding-left:{14 * level}px;{_STYLES.get(row.note_style, '')}"
    cell = f'<td colspan="{len(table.columns)}" style="{style}">{text(row.note, 100)}</td>'
    return f'<tr style="background:none">{cell}</tr>'


def _cell(cell: Cell | Bar, column: Column, tag: str = "td") -> str:
    style = f"{_CELL};text-align:{column.align}"
    if tag == "th":
        style += ";font-weight:600;border-bottom:1px solid currentColor"
    if isinstance(cell, Bar):
        return f'<{tag} style="{style}">{bar(cell.own, cell.total)}</{tag}>'
    if level := len(cell.guides) or cell.level:
        style += f";padding-left:{14 * level}px"
    if cell.style == "dim":
        style += f";{MUTED}"
    content = _styled(text(cell.text + cell.after), cell.style)
    return f'<{tag} style="{style}">{content}</{tag}>'
