"""Dropout, the sum with a residual and its normalisation as one call; the sum too, where others read it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gradscope.patching.match.graph import is_half, number
from gradscope.patching.match.match import Argument, Match, Of, Piece, Scalar, Setting, why_idle
from gradscope.patching.match.matchers.norms import norms
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "add_norm"

_FUNCTIONS = {"layer_norm": "add_layer_norm", "rms_norm": "add_rms_norm"}


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every normalised sum of a residual and what dropout made."""
    for node in recording.nodes:
        if node.op in _FUNCTIONS and node.inputs:
            yield from _of_torch(node)
    for norm in norms(recording):
        region = norm.region
        sum_ = _sum(region.x)
        scaled = bool(norm.least)  # a unit vector: add_rms_norm has no least length
        if sum_ is not None and not scaled and set(region.x.users) <= region.nodes and not region.x.alive:
            function = "add_layer_norm" if norm.centred else "add_rms_norm"
            arguments = [*sum_.operands(), *norm.arguments(), *sum_.settings()]
            reasons = [*norm.reasons, *sum_.reasons()]
            yield Match(
                RECIPE,
                function,
                tuple(arguments),
                region.nodes | sum_.nodes,
                region.output,
                optional=region.constants,
                suffix="[0]",
                reasons=reasons,
                forms=norm.asked(sum_.residual),
            )


class _Sum:
    """A residual plus what dropout made."""

    def __init__(self, output: Value, residual: Value, dropout: Node) -> None:
        assert output.producer is not None
        self.output, self.residual, self.dropout = output, residual, dropout
        self.input = dropout.inputs[0]
        self.nodes = frozenset({output.producer, dropout})

    def operands(self) -> list[Argument]:
        return [Argument("", (Of(self.input, "hidden"),)), Argument("", (Of(self.residual, "residual"),))]

    def settings(self) -> list[Argument]:
        """Share and mode of the dropout."""
        share = Setting(self.dropout, "p", Scalar(self.dropout, 1, "p", "0.5"))
        training = Setting(self.dropout, "training", Scalar(self.dropout, 2, "training", "True"))
        return [Argument("dropout_p", (share,)), Argument("training", (training,))]

    def reasons(self) -> list[str]:
        reasons = []
        share = number(self.dropout.argument(1, "p", 0.5))
        if share is None or share >= 1:
            reasons.append("the dropout probability is 1 or a tensor")
        if self.dropout.argument(3, "inplace", False) or self.dropout.changed:
            reasons.append("dropout modifies its input in place")
        if len({self.input.dtype, self.residual.dtype, self.output.dtype}) > 1:
            reasons.append("the residual's dtype differs from that of the added tensor")
        if self.input.shape != self.output.shape or self.residual.shape != self.output.shape:
            reasons.append("the residual's shape differs from that of the added tensor")
        if self.residual.content == self.input.content:
            reasons.append("in evaluation mode the dropout output and the residual are the same tensor")
        return reasons


def _sum(value: Value) -> _Sum | None:
    """The sum that ``value`` is; None where it is none of a residual with what dropout made for it alone."""
    node = value.producer
    if node is None or node.op != "add" or len(node.args) != 2 or number(node.kwargs.get("alpha", 1)) != 1:
        return None
    if not set(node.kwargs) <= {"alpha"}:
        return None
    for position in (1, 0):
        dropped, residual = node.args[position], node.args[1 - position]
        if isinstance(dropped, Value) and isinstance(residual, Value) and dropped.producer is not None:
            maker = dropped.producer
            if maker.op == "dropout" and maker.places and node.places and maker.places[0].frame is node.places[0].frame:
                return _Sum(value, residual, maker)
    return None


def _of_torch(node: Node) -> Iterator[Match]:
    """A normalisation by torch's own function or module."""
    found = _sum(node.inputs[0])
    if found is None or not node.places or node.places[0].frame is not found.dropout.places[0].frame:
        return
    names = ["weight", "bias"] if node.op == "layer_norm" else ["weight"]
    eps_at, eps = (4, "1e-05") if node.op == "layer_norm" else (3, "None")
    arguments: list[Argument] = []
    vectors: list[Value] = []
    for position, name in enumerate(names, 2):
        vector = node.argument(position, name)
        if isinstance(vector, Value):
            vectors.append(vector)
            pieces: tuple[Piece, ...] = (Setting(node, name, Of(vector, name)),)
            arguments.append(Argument(name, pieces))
    arguments.append(Argument("eps", (Setting(node, "eps", Scalar(node, eps_at, "eps", eps)),)))
    reasons = found.reasons()
    shape = node.argument(1, "normalized_shape")
    last = found.output.shape[-1:]
    if tuple([shape] if isinstance(shape, int) else shape) != last or any(each.shape != last for each in vectors):
        reasons.append("more than the last dimension is normalized")
    if node.output.dtype != found.input.dtype:
        reasons.append("the result's dtype differs from the input's")
    if any(each.dtype not in {found.input.dtype, torch.float32} for each in vectors):
        reasons.append("the dtype of weight or bias differs from the input's")
    if is_half(found.input.dtype) and node.autocast:
        reasons.append("under autocast, torch's normalization returns another dtype")
    whole = [*found.operands(), *arguments, *found.settings()]
    alone = set(found.output.users) == {node} and not found.output.alive
    yield Match(
        RECIPE,
        _FUNCTIONS[node.op],
        tuple(whole),
        found.nodes | ({node} if alone else set()),
        node.output if alone else found.output,
        suffix="[0]" if alone else "",
        reasons=reasons,
        also=None if alone else node,
        idle=why_idle(f"{_FUNCTIONS[node.op]} with dropout", node.output, elements=math.prod(node.output.shape)),
    )
