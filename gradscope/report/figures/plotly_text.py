"""Text for plotly, which takes some of HTML's tags and entities, and MathJax between dollars, for markup."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from gradscope.document import glyphs

# What plotly takes for markup, as entities that it turns back into the character.
_MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
_NAME = 48  # characters of a name in a frame or a title
_HOVER = 96  # characters of a line of a hover text
_LINE = 118  # characters of a line below a figure, which fit 900 pixels


def cut(text: str, most: int = _NAME) -> str:
    """``text`` on one line, control characters made visible, with an ellipsis in the middle where it is too long."""
    text = glyphs.for_encoding("utf-8").text(text)
    if len(text) <= most:
        return text
    front = (most - 1) // 2
    return f"{text[:front]}…{text[len(text) - (most - 1 - front) :]}"


def plain(text: str) -> str:
    """``text`` so that plotly shows it as it is."""
    return text.translate(_MARKUP)


def name(text: str, most: int = _NAME) -> str:
    """A name from outside, cut and escaped."""
    return plain(cut(text, most))


def hover(lines: Iterable[str]) -> str:
    """Lines of plain text as a hover text, the first one bold."""
    first, *rest = (name(line, _HOVER) for line in lines if line)
    return "<br>".join([f"<b>{first}</b>", *rest])


def wrapped(text: str) -> list[str]:
    """Plain text as escaped lines below a figure; words that are longer than one are broken."""
    return [plain(line) for line in textwrap.wrap(glyphs.for_encoding("utf-8").text(text), _LINE)]
