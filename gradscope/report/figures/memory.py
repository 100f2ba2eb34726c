"""The memory of a step over time as a plotly figure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.errors import UsageError
from gradscope.report.figures import plotly_text
from gradscope.report.memorywords import end_ns, peak_words, phase_words
from gradscope.tables import MemoryInfo, RunData, TimelinePoint

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Names and categories of the bands, from below; the last one takes every category that none names.
BANDS = (
    ("weights, optimizer", ("parameters", "buffers", "optimizer state")),
    ("gradients", ("gradients",)),
    ("saved for backward", ("saved activations",)),
    ("temporary", ("other activations", "activation gradients", "temporaries")),
    ("inputs and others", ()),
)
_LEAST_PHASE = 0.07  # of the step: room for its name


def memory_timeline(run: RunData, title: str | None = None) -> go.Figure:
    """Draw the bytes allocated over the step that measured memory, in steps, with its phases and its peak.

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

    points, end = memory.timeline, end_ns(memory)
    # The last point's bytes are allocated until the step ends.
    course = [*points, TimelinePoint(end, points[-1].bytes)] if end > points[-1].ns else list(points)
    seconds = [point.ns / 1e9 for point in course]
    figure = go.Figure()
    for name, values in _bands(memory, len(course)):
        figure.add_scatter(
            x=seconds, y=values, name=name, mode="lines", line={"shape": "hv", "width": 0}, stackgroup="kinds"
        )
    allocated = [point.bytes for point in course]
    figure.add_scatter(x=seconds, y=allocated, name="allocated", mode="lines", line={"shape": "hv"})
    peak_s = memory.peak_ns / 1e9
    figure.add_scatter(
        x=[peak_s], y=[memory.peak_bytes], name="peak", mode="markers", hoverinfo="skip", marker={"size": 9}
    )
    for span in memory.phases:
        named = span.end_ns - span.start_ns >= _LEAST_PHASE * end
        label = {"text": plotly_text.name(span.phase, 20), "font": {"size": 12}}
        figure.add_vrect(
            x0=span.start_ns / 1e9,
            x1=span.end_ns / 1e9,
            line={"width": 1, "dash": "dot"},
            **({"annotation": label, "annotation_position": "outside top"} if named else {}),
        )
    left = memory.peak_ns * 2 < end
    figure.add_annotation(
        x=peak_s,
        y=memory.peak_bytes,
        text=plotly_text.plain(f"peak {units.size(memory.peak_bytes)} {phase_words(memory.peak_phase)}"),
        hovertext=plotly_text.hover(textwrap.wrap(peak_words(memory, run.workload.model), 80)),
        showarrow=False,
        xanchor="left" if left else "right",
        xshift=8 if left else -8,
        yanchor="bottom",
    )
    usual = f"Memory over a step of {plotly_text.cut(run.workload.model or run.workload.target)} on {memory.device}"
    # SI prefixes: 200ms, 1.5GB. The ticks keep the two zeros apart.
    axis = {"tickformat": "~s", "zeroline": False, "ticks": "outside", "ticklen": 6}
    top = max(memory.peak_bytes, 1) * 1.16  # room for the words on the peak
    figure.update_layout(
        title={"text": plotly_text.name(title or usual, 110), "x": 0, "xref": "paper", "font": {"size": 16}},
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.28, "traceorder": "normal"},
        xaxis={**axis, "title": "time from the start of the step", "ticksuffix": "s", "range": [0, max(end, 1) / 1e9]},
        yaxis={**axis, "title": "allocated", "ticksuffix": "B", "range": [0, top]},
    )
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


def _bands(memory: MemoryInfo, points: int) -> list[tuple[str, list[int]]]:
    """Return the bytes at each point of the bands that are more than nothing somewhere; none in older runs."""
    band_of = {category: name for name, categories in BANDS for category in categories}
    sums = {name: [0] * points for name, _ in BANDS}
    for course in memory.categories or ():
        values = sums[band_of.get(course.category, BANDS[-1][0])]
        for i in range(points):
            values[i] += course.bytes[min(i, len(course.bytes) - 1)]
    return [(name, values) for name, values in sums.items() if any(values)]
