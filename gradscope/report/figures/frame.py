"""One rectangle of a flame graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["all", "layer", "part", "operation", "tensor", "other"]


@dataclass(slots=True)
class FlameFrame:
    """A frame and those inside it; the part of ``value`` that no child takes is its own.

    Texts are plain: :mod:`gradscope.report.figures.plotly_text` makes them safe where they are drawn.
    """

    name: str
    value: int  # ns or bytes, its children's included
    kind: Kind
    colour: str = ""  # "#rrggbb"; where the root has none, colours are of :attr:`own`
    about: tuple[str, ...] = ()  # lines of the hover text, after its value
    title: str = ""  # the hover text's first line; the name where there is none
    layers: int = 0  # modules that it stands for itself
    hatched: bool = False
    remark: str = ""  # what stands after the value: "+12.3 %"
    children: list[FlameFrame] = field(default_factory=list)

    @property
    def own(self) -> int:
        """The part of the frame that no child takes."""
        return self.value - sum(child.value for child in self.children)

    def walk(self) -> Iterator[FlameFrame]:
        """This frame and all inside it, parents first."""
        waiting = [self]
        while waiting:
            frame = waiting.pop()
            yield frame
            waiting.extend(reversed(frame.children))
