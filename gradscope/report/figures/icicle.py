"""Frames -> a plotly figure.

Labels that do not fit are hidden, not shrunk (``uniformtext``), and values are drawn as they are: a child never
takes more than its own part of its parent (``branchvalues="total"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.report.figures import plotly_text
from gradscope.report.figures.frame import FlameFrame

if TYPE_CHECKING:
    import plotly.graph_objects as go

TEXT_SIZE = 12  # of names in frames; where one does not fit in LEAST_TEXT_SIZE, it is hidden
LEAST_TEXT_SIZE = 10
FRAME_TEXT = "#15181e"
_ROW = 28  # pixels
_LINE = 16
_TOP = 58
_WIDTH = 900  # of a notebook's cell: what is expected when a text is chosen, and nothing breaks where it is not so
_CHARACTER = 6.6  # pixels, on average, at TEXT_SIZE


def draw(
    root: FlameFrame,
    text: Callable[[float | None], str],
    title: str,
    notes: Sequence[str],
    legend: Sequence[tuple[str, str]],
) -> go.Figure:
    """The figure.

    Args:
        root: every frame that is to be drawn.
        text: a value in words.
        title: plain text.
        notes: sentences that stand below the frames.
        legend: (colour, words) of each colour.
    """
    import plotly.graph_objects as go

    frames = [(frame, level, parent) for frame, level, parent in _numbered(root)]
    trace = go.Icicle(
        ids=[str(number) for number in range(len(frames))],
        labels=[plotly_text.name(frame.name) for frame, _, _ in frames],
        parents=["" if parent is None else str(parent) for _, _, parent in frames],
        values=[frame.value for frame, _, _ in frames],
        text=[_label(frame, root, text) for frame, _, _ in frames],
        hovertext=[_hover(frame, root, text) for frame, _, _ in frames],
        branchvalues="total",
        sort=False,
        texttemplate="%{text}",
        hoverinfo="text",
        tiling={"orientation": "v", "pad": 0},
        leaf={"opacity": 1},
        textposition="middle left",
        textfont={"size": TEXT_SIZE, "color": FRAME_TEXT},
        pathbar={"thickness": 22, "textfont": {"size": TEXT_SIZE, "color": FRAME_TEXT}},
        marker={
            "colors": [frame.colour for frame, _, _ in frames],
            "line": {"width": 1},
            "pattern": {"shape": ["/" if frame.hatched else "" for frame, _, _ in frames], "fgcolor": FRAME_TEXT},
        },
        root={"color": root.colour},
    )
    lines = [*_legend_lines(legend), *(line for note in notes for line in plotly_text.wrapped(note))]
    rows = 1 + max(level for _, level, _ in frames)
    bottom = 14 + _LINE * len(lines)
    figure = go.Figure(trace)
    figure.update_layout(
        title={"text": plotly_text.plain(plotly_text.cut(title, 110)), "x": 0, "xref": "paper", "font": {"size": 16}},
        uniformtext={"minsize": LEAST_TEXT_SIZE, "mode": "hide"},
        margin={"l": 8, "r": 8, "t": _TOP, "b": bottom},
        height=_TOP + _ROW * (rows + 1) + bottom,
        hoverlabel={"align": "left"},
    )
    if lines:
        figure.add_annotation(
            text="<br>".join(lines),
            showarrow=False,
            align="left",
            font={"size": 12},
            x=0,
            y=0,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="top",
            yshift=-6,
        )
    return figure


def _numbered(root: FlameFrame) -> list[tuple[FlameFrame, int, int | None]]:
    """Each frame, its level, and the number of its parent; parents come first."""
    found: list[tuple[FlameFrame, int, int | None]] = [(root, 0, None)]
    for number, (frame, level, _) in enumerate(found):  # the list grows while it is read
        found.extend((child, level + 1, number) for child in frame.children)
    return found


def _label(frame: FlameFrame, root: FlameFrame, text: Callable[[float | None], str]) -> str:
    """Name and value, or the name alone where they would not fit: a label is shown whole or not at all."""
    short = plotly_text.cut(frame.name)
    both = "  ".join(part for part in (short, text(frame.value), frame.remark) if part)
    room = frame.value / root.value * _WIDTH / _CHARACTER
    return plotly_text.plain(both if len(both) <= room else short)


def _hover(frame: FlameFrame, root: FlameFrame, text: Callable[[float | None], str]) -> str:
    worth = f"{text(frame.value)} · {units.percent(frame.value / root.value)}"
    return plotly_text.hover([frame.title or frame.name, worth, *frame.about])


def _legend_lines(legend: Sequence[tuple[str, str]]) -> list[str]:
    """Squares with their meaning, in lines that fit."""
    lines: list[list[tuple[str, str]]] = [[]]
    length = 0
    for colour, words in legend:
        if length + len(words) + 4 > plotly_text.LINE:
            lines.append([])
            length = 0
        lines[-1].append((colour, words))
        length += len(words) + 4
    return [
        "   ".join(f'<span style="color:{colour}">■</span> {plotly_text.plain(words)}' for colour, words in line)
        for line in lines
        if line
    ]
