"""The memory of a step over time as a plotly figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradscope import units
from gradscope.errors import UsageError
from gradscope.report.figures import plotly_text
from gradscope.report.memorywords import peak_words, phase_words
from gradscope.tables import MemoryInfo, PhaseSpan, RunData, TimelinePoint

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Names, colours and categories of the bands, from below; the colours are those of the page.
BANDS = (
    ("weights, optimizer", "#8f99a9", ("parameters", "buffers", "optimizer state")),
    ("gradients", "#c9a552", ("gradients",)),
    ("saved for backward", "#4c86c8", ("saved activations",)),
    ("temporary", "#dd8b73", ("other activations", "activation gradients", "temporaries")),
    ("inputs and others", "#b59ae0", ("inputs", "other tensors")),
)
_ALL = "#4c86c8"
_PEAK = "#d2453b"  # at least 3:1 on white and on black
_HEIGHT = 392
_TOP = 76
_LEAST_PHASE = 0.07  # of the step: room for its name
_HEADROOM = 1.16  # of the peak: room for the words on it


def memory_timeline(run: RunData, title: str | None = None) -> go.Figure:
    """Bytes allocated over the step that measured memory, in steps, with its phases and its peak.

    Where the run says what the memory was, there is a band for each kind; they add up to the line above them.

    Args:
        run: a run that measured memory.
        title: plain text instead of the usual title.

    Raises:
        UsageError: memory was not measured.
    """
    memory = _measured(run)
    if title is not None and not isinstance(title, str):
        raise UsageError(f"title must be a string, or None for the usual one; got {title!r}.")
    import plotly.graph_objects as go

    points, end = memory.timeline, _end_ns(memory)
    # The last point's bytes are allocated until the step ends.
    course = [*points, TimelinePoint(end, points[-1].bytes)] if end > points[-1].ns else list(points)
    seconds = [point.ns / 1e9 for point in course]
    figure = go.Figure()
    for name, colour, values in _bands(memory, len(course)):
        figure.add_scatter(
            x=seconds,
            y=values,
            name=name,
            mode="lines",
            line={"shape": "hv", "width": 0, "color": colour},
            fillcolor=colour,
            stackgroup="kinds",
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=seconds,
        y=[point.bytes for point in course],
        name="allocated",
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": _ALL},
        fill=None if figure.data else "tozeroy",
        hovertext=[_hover(memory, course, i) for i in range(len(course))],
        hoverinfo="text",
        showlegend=False,
    )
    figure.add_scatter(
        x=[memory.peak_ns / 1e9],
        y=[memory.peak_bytes],
        name="peak",
        mode="markers",
        marker={"size": 9, "color": _PEAK, "symbol": "diamond"},
        hovertext=[plotly_text.hover(["peak", *plotly_text.lines(peak_words(memory, run.workload.model, end))])],
        hoverinfo="text",
        showlegend=False,
    )
    _lay_out(figure, memory, end, title or f"Memory over a step of {_subject(run)} on {memory.device}")
    return figure


def _measured(run: RunData) -> MemoryInfo:
    if run.memory is None:
        raise UsageError(
            "memory was not measured in this run, so it has no timeline.\n"
            "Profile with memory: gradscope profile without --no-memory, gradscope.profile with memory=True."
        )
    if not run.memory.timeline:
        raise UsageError(
            "the memory of this run has no timeline: the step that measured it allocated nothing, or RUN.json lacks "
            "memory.timeline.\nProfile again, and save the run with this version."
        )
    return run.memory


def _end_ns(memory: MemoryInfo) -> int:
    return max([memory.timeline[-1].ns, memory.peak_ns, *(span.end_ns for span in memory.phases)])


def _bands(memory: MemoryInfo, points: int) -> list[tuple[str, str, list[int]]]:
    """(name, colour, bytes at each point) of the bands that are more than nothing somewhere; none in older runs."""
    if memory.categories is None:
        return []
    known = {category for _, _, categories in BANDS for category in categories}
    found = []
    for name, colour, categories in BANDS:
        last = name == BANDS[-1][0]
        courses = [
            course.bytes
            for course in memory.categories
            if course.category in categories or (last and course.category not in known)
        ]
        values = [sum(course[min(i, len(course) - 1)] for course in courses) for i in range(points)]
        if any(values):
            found.append((name, colour, values))
    return found


def _hover(memory: MemoryInfo, course: Sequence[TimelinePoint], number: int) -> str:
    point = course[number]
    lines = [units.size(point.bytes), f"at {units.ns(point.ns)}"]
    phase = next((span.phase for span in memory.phases if span.start_ns <= point.ns < span.end_ns), None)
    if phase is not None:
        lines.append(phase_words(phase))
    for name, _, values in _bands_at(memory, min(number, len(memory.timeline) - 1)):
        lines.append(f"{name} {units.size(values)}")
    return plotly_text.hover(lines)


def _bands_at(memory: MemoryInfo, point: int) -> list[tuple[str, str, int]]:
    if memory.categories is None:
        return []
    return [
        (name, colour, amount)
        for name, colour, categories in BANDS
        if (amount := sum(course.bytes[point] for course in memory.categories if course.category in categories))
    ]


def _lay_out(figure: go.Figure, memory: MemoryInfo, end: int, title: str) -> None:
    axis = {
        "ticksuffix": "s",
        "tickformat": "~s",  # SI prefixes: 200ms, 1.5GB
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",  # keeps the two zeros apart
    }
    figure.update_layout(
        title={"text": plotly_text.plain(plotly_text.cut(title, 110)), "x": 0, "xref": "paper", "font": {"size": 16}},
        height=_HEIGHT,
        margin={"l": 64, "r": 12, "t": _TOP, "b": 98},
        hovermode="closest",
        legend={"orientation": "h", "x": 0, "y": -0.28, "yanchor": "top", "traceorder": "normal"},
        xaxis={**axis, "title": {"text": "time from the start of the step"}, "range": [0, max(end, 1) / 1e9]},
        yaxis={
            **axis,
            "ticksuffix": "B",
            "title": {"text": "allocated"},
            "range": [0, max(memory.peak_bytes, 1) * _HEADROOM],
        },
    )
    for span in memory.phases:
        _mark_phase(figure, span, end)
    left = memory.peak_ns * 2 < end
    figure.add_annotation(
        x=memory.peak_ns / 1e9,
        y=memory.peak_bytes,
        text=plotly_text.plain(f"peak {units.size(memory.peak_bytes)} {phase_words(memory.peak_phase)}"),
        font={"size": 12},
        showarrow=False,
        xanchor="left" if left else "right",
        xshift=8 if left else -8,
        yanchor="bottom",
    )


def _mark_phase(figure: go.Figure, span: PhaseSpan, end: int) -> None:
    """Draw a phase's border, and its name above the graph where there is room for it."""
    line: dict[str, Any] = {"width": 1, "dash": "dot", "color": "#8a8f98"}
    if span.start_ns > 0:
        figure.add_vline(x=span.start_ns / 1e9, line=line)
    if span.end_ns - span.start_ns >= _LEAST_PHASE * end:
        figure.add_annotation(
            x=(span.start_ns + span.end_ns) / 2e9,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=plotly_text.name(span.phase, 20),
            font={"size": 12},
            showarrow=False,
        )


def _subject(run: RunData) -> str:
    return plotly_text.cut(run.workload.model or run.workload.target)
