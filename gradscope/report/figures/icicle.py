"""Frames -> a plotly figure; its style, and what happens on a click, are plotly's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.report.figures import plotly_text
from gradscope.report.figures.frame import FlameFrame

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROW, _TOP, _LINE = 28, 58, 16  # pixels
_CHARACTERS = 136  # of a label across a notebook's cell; nothing breaks where it is of another width


def draw(root: FlameFrame, text: Callable[[float | None], str], title: str, notes: Sequence[str]) -> go.Figure:
    """Return the figure.

    Args:
        root: every frame that is to be drawn.
        text: a value in words.
        title: plain text.
        notes: sentences that stand below the frames; empty ones are left out.
    """
    import plotly.graph_objects as go

    found: list[tuple[FlameFrame, int, str]] = [(root, 1, "")]
    for number, (frame, level, _) in enumerate(found):  # the list grows while it is read: parents come first
        found.extend((child, level + 1, str(number)) for child in frame.children)
    frames = [frame for frame, _, _ in found]
    # A child never takes more than its own part of its parent: branchvalues="total".
    trace = go.Icicle(
        ids=[str(number) for number in range(len(frames))],
        labels=[plotly_text.name(frame.name) for frame in frames],
        parents=[parent for _, _, parent in found],
        values=[frame.value for frame in frames],
        text=[_label(frame, root, text) for frame in frames],
        hovertext=[_hover(frame, root, text) for frame in frames],
        branchvalues="total",
        sort=False,
        texttemplate="%{text}",
        hoverinfo="text",
        tiling={"orientation": "v"},
        leaf={"opacity": 1},
        textposition="middle left",
    )
    if root.colour:
        shapes = ["/" if frame.hatched else "" for frame in frames]
        trace.update(marker={"colors": [frame.colour for frame in frames], "pattern": {"shape": shapes}})
    else:
        trace.update(marker={"colors": [frame.own for frame in frames], "colorscale": "YlOrRd"})
    lines = [line for note in notes for line in plotly_text.wrapped(note)]
    bottom = 14 + _LINE * len(lines)
    figure = go.Figure(trace)
    figure.update_layout(
        title={"text": plotly_text.name(title, 110), "x": 0, "xref": "paper", "font": {"size": 16}},
        uniformtext={"minsize": 10, "mode": "hide"},  # a label that does not fit is hidden, not shrunk
        margin={"l": 8, "r": 8, "t": _TOP, "b": bottom},
        height=_TOP + _ROW * (1 + max(level for _, level, _ in found)) + bottom,
    )
    if lines:
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": 0, "yref": "paper", "yanchor": "top", "yshift": -6}
        figure.add_annotation(text="<br>".join(lines), showarrow=False, align="left", font={"size": 12}, **place)
    return figure


def _label(frame: FlameFrame, root: FlameFrame, text: Callable[[float | None], str]) -> str:
    """Name and value, or the name alone where they would not fit: a label is shown whole or not at all."""
    short = plotly_text.cut(frame.name)
    both = "  ".join(part for part in (short, text(frame.value), frame.remark) if part)
    return plotly_text.plain(both if len(both) <= frame.value / root.value * _CHARACTERS else short)


def _hover(frame: FlameFrame, root: FlameFrame, text: Callable[[float | None], str]) -> str:
    worth = f"{text(frame.value)} · {units.percent(frame.value / root.value)}"
    return plotly_text.hover([frame.title or frame.name, worth, *frame.about])
