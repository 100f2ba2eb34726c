"""A run as frames: the whole, in it the model's layers and what is outside them, in each layer its own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.errors import UsageError
from gradscope.report.figures import icicle, plotly_text
from gradscope.report.figures.frame import FlameFrame, Kind
from gradscope.report.figures.options import FlameMetric, FlameOptions
from gradscope.report.figures.prune import Pruned, prune
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.header import partial_text
from gradscope.report.layer_cost import Amounts
from gradscope.report.memorywords import tensor_words
from gradscope.report.view import LAYER_PHASES, LEDGER_WORDS, OUTSIDE_PHASES
from gradscope.tables import RunData

if TYPE_CHECKING:
    import plotly.graph_objects as go

_FORWARD = frozenset(("forward",))


@dataclass(frozen=True, slots=True)
class Metric:
    """What the width of a frame is its part of."""

    words: str  # "backward pass"
    value: Callable[[Amounts], int]
    text: Callable[[float | None], str]
    phases: frozenset[str]  # of the operations that are part of it


METRICS: Mapping[FlameMetric, Metric] = {
    "backward": Metric("backward pass", lambda amounts: amounts.backward_ns, units.ns, LAYER_PHASES),
    "forward": Metric("forward pass", lambda amounts: amounts.forward_ns, units.ns, _FORWARD),
    "both": Metric(
        "forward and backward pass",
        lambda amounts: amounts.forward_ns + amounts.backward_ns,
        units.ns,
        LAYER_PHASES | _FORWARD,
    ),
    "saved": Metric("saved for backward", lambda amounts: amounts.saved_bytes or 0, units.size, frozenset()),
}


def flamegraph(run: RunData, options: FlameOptions) -> go.Figure:
    """The run as a plotly icicle.

    Raises:
        UsageError: the metric was not measured, or there is nothing of it.
    """
    whole = build_frames(run, options)
    pruned = prune(whole, options.min_percent / 100 * whole.value, options.max_frames)
    metric = METRICS[options.metric]
    about = "Width: a frame with all inside it. Colour: what it takes itself, from yellow to red."
    notes = [about, partial_text(run), *drawn_words(pruned, options, metric.text)]
    model = plotly_text.cut(run.workload.model or run.workload.target)
    title = options.title or f"{model}: {metric.words}, {metric.text(whole.value)} a step"
    return icicle.draw(pruned.root, metric.text, title, notes)


def build_frames(run: RunData, options: FlameOptions) -> FlameFrame:
    """All frames of a run. The root is the ledger's total; layers and what is outside them add up to it.

    Raises:
        UsageError: as :func:`flamegraph`.
    """
    require_measured(run, options.metric)
    metric = METRICS[options.metric]
    nodes = layer_nodes(run, options.merge)
    operations = _Operations(run, options.metric, nodes)
    is_compiled = any(row.estimated_ns is not None for row in run.layers)
    layers = [_layer_frame(node, metric, operations, is_compiled) for node in nodes]
    return with_outside(run, options.metric, layers, operations)


def layer_nodes(run: RunData, merge: bool) -> list[FoldedNode]:
    """The roots of the tree of layers, as the terminal folds them, or not folded at all."""
    rows = run.layers
    if not merge:
        # No two layers are of one structure then, and only those of one structure are folded.
        rows = [replace(row, parameters=number) for number, row in enumerate(rows)]
    return build_tree(rows, run.step.backward_ns, run.workload.model)


def require_measured(run: RunData, metric: FlameMetric, which: str = "this run") -> None:
    """Raise :class:`UsageError` unless there is something of ``metric`` to draw."""
    if metric == "saved" and (run.memory is None or all(row.saved_bytes is None for row in run.layers)):
        raise UsageError(
            f"memory was not measured in {which}, so there is no flame graph of what is saved for backward.\n"
            'Profile with memory (without --no-memory), or take metric="backward".'
        )
    if whole_of(run, metric) <= 0:
        raise UsageError(
            f"the {METRICS[metric].words} of {which} is {METRICS[metric].text(0)}: there is nothing to draw.\n"
            f"Other metrics: {', '.join(name for name in METRICS if name != metric)}."
        )


def whole_of(run: RunData, metric: FlameMetric) -> int:
    """The total that frames are a share of: ns a step, or bytes."""
    if metric == "saved":
        return 0 if run.memory is None else run.memory.saved_bytes
    forward = max(run.step.forward_ns, sum(row.forward_self_ns for row in run.layers))
    return {"backward": 0, "forward": forward, "both": forward}[metric] + (
        0 if metric == "forward" else run.ledger.backward_ns
    )


def with_outside(
    run: RunData, metric: FlameMetric, layers: Sequence[FlameFrame], operations: _Operations | None = None
) -> FlameFrame:
    """The root over ``layers`` and over what no layer accounts for."""
    whole, parts = whole_of(run, metric), []
    if metric in ("backward", "both"):
        for part, phase in OUTSIDE_PHASES.items():
            words, meaning = LEDGER_WORDS[part]
            parts.append(_part(words, getattr(run.ledger, part), meaning, phase, operations))
    rest = whole - sum(frame.value for frame in (*layers, *parts))
    meaning = "saved outside every module" if metric == "saved" else "forward time of no layer"
    parts.append(_part("outside the layers", rest, meaning, "saved" if metric == "saved" else "forward", operations))
    return FlameFrame(METRICS[metric].words, whole, "all", children=[*layers, *parts])


def drawn_words(pruned: Pruned, options: FlameOptions, text: Callable[[float | None], str]) -> list[str]:
    """Sentences on what was folded and what was left out."""
    notes = []
    if options.merge and any(frame.layers > 1 for frame in pruned.root.walk() if frame.kind == "layer"):
        notes.append("Repeated blocks are one frame, ×N, with the sum of their values (merge=False draws each).")
    if pruned.words:
        share = units.percent(pruned.value / pruned.root.value)
        notes.append(
            f"{pruned.words} of at most {text(pruned.largest)} are not drawn by themselves: "
            f"{text(pruned.value)} in all, {share} (min_percent={options.min_percent:g}, "
            f"max_frames={options.max_frames})."
        )
    return notes


# --------------------------------------------------------------------------------------------------------------------
# Frames
# --------------------------------------------------------------------------------------------------------------------


def _layer_frame(node: FoldedNode, metric: Metric, operations: _Operations, is_compiled: bool) -> FlameFrame:
    return FlameFrame(
        name=node.name,
        value=metric.value(node.total),
        kind="layer",
        title=node.place,
        about=layer_words(node, metric, is_compiled=is_compiled),
        layers=node.own.layers,
        children=[
            *(_layer_frame(child, metric, operations, is_compiled) for child in node.children),
            *operations.of(node, metric.value(node.own)),
        ],
    )


def layer_words(node: FoldedNode, metric: Metric, *, is_compiled: bool = False) -> tuple[str, ...]:
    """What a hover text says of a layer: class and repeats, its own part, both passes, calls."""
    repeats = len(node.paths)
    own, total = node.own, node.total
    times = f"forward {units.ns(total.forward_ns)} · backward {units.ns(total.backward_ns)}"
    if total.ratio is not None:
        times += f" · {units.ratio(total.ratio)}"
    forward, backward = total.forward_limited, total.backward_limited
    saved = "" if total.saved_bytes is None else f"saved for backward {units.size(total.saved_bytes)}"
    return (
        " · ".join(part for part in (node.class_name, f"{repeats} layers, summed" if repeats > 1 else "") if part),
        f"the layer itself {metric.text(metric.value(own))}" if node.children else "",
        times,
        backward.words("backward", total.backward_ns) if backward is not None else "",
        forward.words("forward", total.forward_ns) if forward is not None else "",
        saved,
        _calls(node, is_compiled),
    )


def _calls(node: FoldedNode, is_compiled: bool) -> str:
    if node.calls:
        return f"{units.calls(node.calls)} call{'s' * (node.calls != 1)} a step"
    # In a compiled graph no module is called: its operations are a part of the graph.
    ran = is_compiled and node.total.forward_ns + node.total.backward_ns > 0
    return "in compiled code" if ran else "never called itself"


def _part(words: str, value: int, meaning: str, phase: str, operations: _Operations | None) -> FlameFrame:
    inside = [] if operations is None else operations.outside(phase, value)
    return FlameFrame(words, max(value, 0), "part", about=(meaning,), children=inside)


@dataclass(slots=True)
class _EqualOps:
    """Equal operations of one frame."""

    value: int = 0
    calls: float = 0.0
    shape: str | None = None
    most: int = -1  # value of the largest one, whose shape is shown


class _Operations:
    """Operations, or saved tensors, by the node that they belong to."""

    def __init__(self, run: RunData, metric: FlameMetric, roots: Sequence[FoldedNode]) -> None:
        self._nodes = {path: id(node) for root in roots for node in root.walk() for path in node.paths}
        self._sums: dict[object, dict[tuple[str, str], _EqualOps]] = {}
        self._text = METRICS[metric].text
        self._kind: Kind = "tensor" if metric == "saved" else "operation"
        if metric == "saved":
            for row in () if run.memory is None else run.memory.saved:
                self._add(row.layer, "saved", tensor_words(row.node, row.what, "", ""), row.bytes, row.count, row.shape)
            return
        phases = METRICS[metric].phases
        for op in run.ops:
            if (op.layer is None and op.phase != "engine") or op.phase in phases:  # the engine's part has no parts
                self._add(op.layer, op.phase, op.name, op.self_ns, op.calls, op.shape)

    def _add(self, layer: str | None, phase: str, name: str, value: int, calls: float, shape: str | None) -> None:
        owner: object = phase if layer is None else self._nodes.get(layer)
        entry = self._sums.setdefault(owner, {}).setdefault((name, phase), _EqualOps())
        entry.value += value
        entry.calls += calls
        if value > entry.most:
            entry.most, entry.shape = value, shape

    def of(self, node: FoldedNode, own: int) -> list[FlameFrame]:
        """The operations of a layer itself, the largest first."""
        return self._frames(id(node), own, node.place)

    def outside(self, phase: str, own: int) -> list[FlameFrame]:
        """Frames of the operations of no layer in ``phase``."""
        return self._frames(phase, own, "outside the layers")

    def _frames(self, owner: object, own: int, where: str) -> list[FlameFrame]:
        sums = self._sums.get(owner, {})
        # They are listed by another pass: where they are more than the layer has, the layer is right.
        if sum(entry.value for entry in sums.values()) > own or any(entry.value < 0 for entry in sums.values()):
            return []
        ordered = sorted(sums.items(), key=lambda item: -item[1].value)
        return [
            FlameFrame(name, entry.value, self._kind, title=name, about=(f"in {where}", *self._words(phase, entry)))
            for (name, phase), entry in ordered
        ]

    def _words(self, phase: str, entry: _EqualOps) -> Iterable[str]:
        if self._kind == "tensor":
            yield f"{units.calls(entry.calls)} {'tensor' if entry.calls == 1 else 'tensors'}"
        else:
            yield f"{phase.replace('_', ' ')} · {units.calls(entry.calls)} call{'s' * (entry.calls != 1)} a step"
        yield entry.shape or ""
