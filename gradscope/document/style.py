"""Styles by name, and text in lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from gradscope.document.glyphs import Glyphs
from gradscope.document.grid import Line
from gradscope.document.parts import Style

_NO_BREAK = "\N{NO-BREAK SPACE}"  # textwrap breaks at plain spaces only

# Names used in lines -> rich styles. Chosen to read on dark and on light backgrounds.
STYLES: Mapping[str, str] = {
    "head": "dim",
    "title": "bold",
    "strong": "bold",
    "dim": "dim",
    "hot": "bold red",
    "warm": "yellow",
    "own": "red",
    "below": "dim",
    "warn": "bold yellow",
    "worse": "bold red",
    "command": "bold cyan",
}


def heat(share: float) -> Style:
    """The style of a share: only an accent, the number beside it says the same."""
    return "hot" if share >= 0.10 else "warm" if share >= 0.03 else ""


def wrapped(text: str, width: int, marks: Glyphs, first: str = "", style: str = "") -> list[Line]:
    """``text`` in lines of at most ``width``, with ``first`` before it and the rest indented as far.

    Where the text is a list joined by dots or pluses, lines break between its items.
    """
    rest = " " * len(first)
    room = max(width - len(first), 10)
    text = marks.text(text)  # which may be longer
    for joint in (marks.text(" · "), " + "):
        items = text.split(joint)
        if len(items) > 1:
            kept = [item.replace(" ", _NO_BREAK) if len(item) + 2 < room else item for item in items]
            text = f"{joint.rstrip().replace(' ', _NO_BREAK)} ".join(kept)
    parts = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    clean = [part.replace(_NO_BREAK, " ") for part in parts]
    return [[(first if i == 0 else rest, "dim"), (part, style)] for i, part in enumerate(clean)]
