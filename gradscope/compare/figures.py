"""A comparison as a flame graph: the layers of the run after, coloured by how each one changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.compare import messages
from gradscope.compare.changes import Change, Comparison, Presence, Unit
from gradscope.compare.layers import measured, time_change
from gradscope.compare.measured import RunSpread
from gradscope.report.figures import icicle, plotly_text
from gradscope.report.figures.flame import (
    METRICS,
    drawn_words,
    layer_nodes,
    require_measured,
    whole_of,
    with_outside,
)
from gradscope.report.figures.frame import FlameFrame
from gradscope.report.figures.options import FlameMetric, FlameOptions
from gradscope.report.figures.prune import prune
from gradscope.report.fold import FoldedNode
from gradscope.report.view import LEDGER_WORDS

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LESS, _SAME, _MORE = "#4f97e0", "#d5d8de", "#ee8a3c"
_FULL = 2.0  # the ratio of full colour: twice, or half
_FAINTEST = 0.3  # of full colour: a real change is never taken for none
_NAMED = 4  # removed layers that are named
_LEGEND = (
    "Orange takes more than before, blue less, grey is within noise or not known, hatched is new; "
    "full colour is twice or half."
)
# The columns of layers that each metric is the sum of; without "total" they are those of the step.
_COLUMNS: Mapping[FlameMetric, Sequence[str]] = {
    "backward": ("backward_total_ns",),
    "forward": ("forward_total_ns",),
    "both": ("backward_total_ns", "forward_total_ns"),
    "saved": ("saved_total_bytes",),
}


def flamegraph(comparison: Comparison, options: FlameOptions) -> go.Figure:
    """The figure. Widths are values of the run after; colours are changes beyond the noise of both runs.

    Raises:
        UsageError: the metric was not measured in both runs, or there is nothing of it in the run after.
    """
    whole, changes = build_frames(comparison, options)
    least = options.min_percent / 100 * whole.value
    pruned = prune(whole, least, options.max_frames)
    text = METRICS[options.metric].text
    notes = [f"WARNING, the runs differ in more than the code: {one.text}" for one in comparison.mismatches]
    notes += [_removed(comparison.removed, options.metric)]
    notes += [_shrunk(whole, changes, least), *drawn_words(pruned, options, text)]
    title = options.title or _title(comparison, options.metric, changes[id(whole)])
    return icicle.draw(pruned.root, text, title, [_LEGEND, *notes])


def build_frames(comparison: Comparison, options: FlameOptions) -> tuple[FlameFrame, dict[int, Change]]:
    """All frames of the run after, and the change of each by its ``id``; what is not known of a frame is not there.

    Raises:
        UsageError: as :func:`flamegraph`.
    """
    metric = options.metric
    require_measured(comparison.after, metric, "the run after")
    if metric == "saved" or whole_of(comparison.before, metric) > 0:
        require_measured(comparison.before, metric, "the run before")
    builder = _FrameBuilder(comparison, options)
    root = with_outside(comparison.after, metric, builder.layers())
    totals = {change.metric: change for change in comparison.totals}
    of_the_step = [column.replace("total_", "") for column in _COLUMNS[metric]]
    builder.paint(root, _sum([totals[name] for name in of_the_step if name in totals]))
    keys = {title: key for key, (title, _) in LEDGER_WORDS.items()}
    for part in root.children:
        change = totals.get(keys.get(part.name, ""))
        if part.kind == "part":
            part.colour = _SAME
            builder.paint(part, change)
    return root, builder.changes


class _FrameBuilder:
    """Frames of the layers of the run after, and their changes."""

    def __init__(self, comparison: Comparison, options: FlameOptions) -> None:
        self._metric = options.metric
        self._text = METRICS[options.metric].text
        self._value = METRICS[options.metric].value
        self._spreads = (RunSpread(comparison.before), RunSpread(comparison.after))
        self._nodes = layer_nodes(comparison.after, options.merge)
        # So many differences are looked at together: see noise.py.
        self._tested = max(sum(1 for root in self._nodes for _ in root.walk()), 1)
        self.changes: dict[int, Change] = {}

    def layers(self) -> list[FlameFrame]:
        """A frame for each root."""
        return [self._frame(node) for node in self._nodes]

    def paint(self, frame: FlameFrame, change: Change | None) -> None:
        """Colour and words of a frame that changed so."""
        frame.colour = colour_of(change)
        if change is None:
            return
        self.changes[id(frame)] = change
        if change.before is None:
            frame.hatched, frame.remark = True, "new"
            frame.about = ("only in the run after", *frame.about)
            return
        frame.remark = messages.relative(change) if change.real and change.difference else ""
        frame.about = (*_words(change, self._text), *frame.about)

    def _frame(self, node: FoldedNode) -> FlameFrame:
        children = [self._frame(child) for child in node.children]
        repeats = len(node.paths)
        known = sum(1 for path in node.paths if path in self._spreads[0].by_path)
        about = [node.class_name + (f" · {repeats} layers, summed" if repeats > 1 else "")]
        if 0 < known < repeats:
            about.append(f"{repeats - known} of them only in the run after")
        frame = FlameFrame(
            name=node.name,
            value=self._value(node.total),
            kind="layer",
            about=tuple(about),
            title=node.place,
            layers=node.own.layers,
            children=children,
        )
        self.paint(frame, self._change(node))
        return frame

    def _change(self, node: FoldedNode) -> Change:
        sides = [(spread, [path for path in node.paths if path in spread.by_path]) for spread in self._spreads]
        if not sides[0][1]:
            unit: Unit = "bytes" if self._metric == "saved" else "ns"
            return Change(self._metric, unit, None, self._value(node.total), None)
        if self._metric == "saved":
            before, after = (
                sum(row.saved_bytes or 0 for path in paths for row in spread.below[path]) for spread, paths in sides
            )
            return Change("saved_total_bytes", "bytes", before, after, 0)
        return _sum(
            [
                time_change(column, [measured(*side, column) for side in sides], self._spreads, self._tested)
                for column in _COLUMNS[self._metric]
            ]
        )


def colour_of(change: Change | None) -> str:
    """Blue for less, orange for more, grey for what is within noise or not known; the scale is that of the ratio."""
    if change is None or not change.real or not change.difference:
        return _SAME
    ratio = _FULL if change.ratio is None else max(change.ratio, 1e-9)
    strength = min(max(abs(math.log(ratio, _FULL)), _FAINTEST), 1.0)
    return _mixed(_SAME, _MORE if change.difference > 0 else _LESS, strength)


def _mixed(colour: str, other: str, part: float) -> str:
    """Return ``colour`` with ``part``, 0..1, of ``other``."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round(one + (two - one) * part):02x}" for one, two in pairs)


def _sum(changes: Sequence[Change]) -> Change:
    """The sum of changes measured together: their limits of noise are added, which is on the safe side."""
    first = changes[0]
    if len(changes) == 1:
        return first
    before = [change.before for change in changes]
    after = [change.after for change in changes]
    noise = [change.noise for change in changes]
    return Change(
        metric=" + ".join(change.metric for change in changes),
        unit=first.unit,
        before=None if None in before else sum(one for one in before if one is not None),
        after=None if None in after else sum(one for one in after if one is not None),
        noise=None if None in noise else sum(one for one in noise if one is not None),
        basis=first.basis,
    )


def _words(change: Change, text: Callable[[float | None], str]) -> list[str]:
    lines = [f"{text(change.before)} → {text(change.after)}"]
    if change.difference:
        lines[0] += f", {messages.signed(change.difference, change.unit)}, {messages.relative(change)}"
    if change.unit != "ns":
        return [*lines, messages.verdict(change)]
    beyond = "beyond" if change.real else "within"
    known = change.noise is not None and change.difference
    return [*lines, f"{beyond} the noise of {messages.noise(change)}" if known else messages.verdict(change)]


def _title(comparison: Comparison, metric: FlameMetric, change: Change) -> str:
    model = plotly_text.cut(comparison.after.workload.model or comparison.after.workload.target)
    text = METRICS[metric].text
    title = f"{model}: {METRICS[metric].words}, {text(change.before)} → {text(change.after)}"
    if not change.difference:
        return f"{title}, the same"
    verdict = "" if change.real else f" ({messages.verdict(change)})"
    return f"{title}, {messages.relative(change)}{verdict}"


def _removed(found: Sequence[Presence], metric: FlameMetric) -> str:
    """A sentence on the layers that the run after has not."""
    if not found:
        return ""
    named = [
        f"{plotly_text.cut(messages.repeated(one.address, len(one.paths)))} ({_worth(one, metric)})"
        for one in found[:_NAMED]
    ]
    return f"Removed, and not drawn: {', '.join([*named, *_more(len(found))])}."


def _worth(one: Presence, metric: FlameMetric) -> str:
    if metric == "saved":
        return units.size(one.saved_bytes)
    times = {"backward": one.backward_ns, "forward": one.forward_ns, "both": one.backward_ns + one.forward_ns}
    return units.ns(times[metric])


def _shrunk(root: FlameFrame, changes: Mapping[int, Change], least: float) -> str:
    """A sentence on layers that lost so much that they are too small to be seen."""
    lost = []
    for frame in root.walk():
        change = changes.get(id(frame))
        if frame.kind != "layer" or frame.children or change is None or not change.real or frame.value >= least:
            continue
        if -(change.difference or 0) >= least:
            text = units.ns if change.unit == "ns" else units.size
            words_on = f"{plotly_text.cut(frame.title)} ({_words(change, text)[0]})"
            lost.append((change.difference or 0, words_on))
    if not lost:
        return ""
    named = [text for _, text in sorted(lost)[:_NAMED]]
    return f"Too small to be seen now: {'; '.join([*named, *_more(len(lost))])}."


def _more(many: int) -> list[str]:
    return [f"{many - _NAMED} more"] if many > _NAMED else []
