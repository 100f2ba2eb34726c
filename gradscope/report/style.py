"""Styles by name, and the few shapes of text that every section of the terminal's report uses."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping

from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Line, cut_line

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
    "command": "bold cyan",
}


def heat(share: float) -> str:
    """The style of a share: only an accent, the number beside it says the same."""
    return "hot" if share >= 0.10 else "warm" if share >= 0.03 else ""


def heading(title: str, about: str, width: int, marks: Glyphs) -> Line:
    """A section's title and what its numbers mean."""
    line: Line = [(title, "title")]
    if about:
        line.append((marks.text(f"  {about}"), "dim"))
    return cut_line(line, width, marks)


def titled(title: str, about: str, width: int, marks: Glyphs) -> list[Line]:
    """A heading as :func:`heading` makes them, of what must not be cut: in several lines where it is long."""
    first, *rest = wrapped(about, width, marks, first=f"{title}  ", style="dim")
    return [[(first[0][0], "title"), *first[1:]], *rest]


def share_bar(share: float, marks: Glyphs) -> Callable[[int], Line]:
    """A cell with a bar for one share, 0..1."""
    return lambda width: [(marks.bar(share, share, width)[0], "own")]


def wrapped(text: str, width: int, marks: Glyphs, first: str = "", style: str = "") -> list[Line]:
    """``text`` in lines of at most ``width``, with ``first`` before it and the rest indented as far.

    Where the text is a list joined by dots or pluses, lines break between its items.
    """
    rest = " " * len(first)
    room = max(width - len(first), 10)
    for joint in (" · ", " + "):
        items = text.split(joint)
        if len(items) > 1:
            kept = [item.replace(" ", _NO_BREAK) if len(item) + 2 < room else item for item in items]
            text = f"{joint.rstrip().replace(' ', _NO_BREAK)} ".join(kept)
    parts = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    clean = [marks.text(part.replace(_NO_BREAK, " ")) for part in parts]
    return [[(first if i == 0 else rest, "dim"), (part, style)] for i, part in enumerate(clean)]
