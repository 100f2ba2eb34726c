"""Characters that the terminal can show: full Unicode, or plain ASCII where its encoding has no more.

Also the two things every text from outside (source lines, layer names) needs before it is printed: control
characters made visible, and cutting to a width in cells.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from gradscope.safe_text import visible

# One character for one, but for the ellipsis: columns keep their widths.
_ASCII = str.maketrans(dict(zip("×µ·±─→÷├▲", "xu|~->/|^", strict=True)) | {"…": "..."})


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What trees, bars and cut texts are drawn with."""

    encoding: str
    unicode: bool
    tee: str
    corner: str
    pipe: str
    own: str  # part of a bar that is the layer's own time
    fractions: str  # cells filled less than whole, in equal steps; the last is the whole cell
    below: str  # part of a bar that is spent in layers below
    heights: str  # cells filled from below, in equal steps; the last is the whole cell
    ellipsis: str

    def text(self, text: str) -> str:
        """``text`` as this terminal can show it, on one line and without control characters."""
        text = visible(text)
        if self.unicode:
            return text
        return text.translate(_ASCII).encode(self.encoding, "backslashreplace").decode(self.encoding)

    def cut(self, text: str, width: int) -> str:
        """``text`` in at most ``width`` cells, with an ellipsis where something was cut off."""
        if cell_len(text) <= width:
            return text
        mark = self.ellipsis if width > len(self.ellipsis) else ""
        return set_cell_size(text, max(width - len(mark), 0)).rstrip() + mark

    def bar(self, own: float, total: float, width: int) -> tuple[str, str]:
        """A bar of ``width`` cells for shares 0..1: the part for ``own``, and the part for the rest of ``total``.

        Whatever is more than nothing gets a mark, and it is thinner than a cell where the share is.
        """
        parts = len(self.fractions)
        steps = min(round(own * width * parts), width * parts)
        solid = self.own * (steps // parts)
        if steps % parts:
            solid += self.fractions[steps % parts - 1]
        elif own > 0 and not steps:
            solid = self.fractions[0]
        light = self.below * max(min(round(total * width), width) - len(solid), 0)
        if total > 0 and not solid + light:
            light = self.fractions[0]
        return solid, light


def for_encoding(encoding: str | None) -> Glyphs:
    """The glyphs that can be written in ``encoding``; ASCII for everything that is not a UTF."""
    encoding = encoding or "ascii"
    if encoding.lower().replace("_", "-").startswith("utf"):
        return Glyphs(encoding, True, "├─ ", "└─ ", "│  ", "█", "▏▎▍▌▋▊▉█", "░", "▁▂▃▄▅▆▇█", "…")
    return Glyphs("ascii", False, "|- ", "`- ", "|  ", "#", ".#", "-", ".:#", "...")
