"""Pieces of HTML for a notebook's cell: tables and bars with inline styles, and text that stays text.

Notebooks strip scripts and often style sheets, and typeset what stands between dollars. So all styles are inline,
colours are the notebook's own or legible on any background, and what could be markup is broken up.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradscope.report import glyphs

MUTED = "opacity:.75"
WARN = "#d0651b"  # on white and on black alike at least 3.9:1; what it marks says it in words too
_OWN, _BELOW = "#e0813a", "#8a909a"
_BOX = "font:13px/1.45 system-ui,sans-serif;color:inherit;text-align:left;overflow-x:auto;overflow-wrap:anywhere"
_CELL = "padding:1px 8px 1px 0;border:0;white-space:nowrap"
# What begins and ends mathematics for MathJax: in an element of its own it does neither.
_MATH = re.compile(r"[$\\]")
NAME = 64  # characters of a name
SENTENCE = 400


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: HTML made by this module, never text from outside."""

    content: str
    right: bool = False
    muted: bool = False
    indent: int = 0  # levels
    span: int = 1  # columns


def text(raw: str, most: int = NAME) -> str:
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


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    """A table; the cells of every row span as many columns as ``head`` has."""
    body = "".join(f'<tr style="background:none">{"".join(map(_cell, row))}</tr>' for row in rows)
    top = "".join(_cell(cell, "th") for cell in head)
    return (
        f'<table style="border-collapse:collapse;border:0;margin:4px 0;color:inherit;font-size:13px"><thead>'
        f'<tr style="background:none">{top}</tr></thead><tbody>{body}</tbody></table>'
    )


def line(content: str, style: str = "") -> str:
    """One line of HTML."""
    return f'<div style="{style}">{content}</div>' if style else f"<div>{content}</div>"


def heading(title: str, about: str = "") -> str:
    """The title of a section, and what its numbers mean."""
    words = f' <span style="font-weight:normal;{MUTED}">{text(about, SENTENCE)}</span>' if about else ""
    return f'<div style="font-weight:600;margin-top:6px">{text(title)}{words}</div>'


def box(parts: Sequence[str]) -> str:
    """Box in all output of a notebook's cell. The classes keep MathJax off where it looks for them."""
    return f'<div class="gradscope tex2jax_ignore mathjax_ignore" style="{_BOX}">{"".join(parts)}</div>'


def _cell(cell: Cell, tag: str = "td") -> str:
    style = f"{_CELL};text-align:{'right' if cell.right else 'left'}"
    if tag == "th":
        style += ";font-weight:600;border-bottom:1px solid currentColor"
    if cell.indent:
        style += f";padding-left:{14 * cell.indent}px"
    if cell.muted:
        style += f";{MUTED}"
    span = f' colspan="{cell.span}"' if cell.span > 1 else ""
    return f'<{tag}{span} style="{style}">{cell.content}</{tag}>'
