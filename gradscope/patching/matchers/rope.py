"""Rotary positions by hand: pairs of features turned by tables of cosines and sines, in whatever spelling.

What a spelling does is not read off its form. The calls between a tensor and its turned self are run again, on random
numbers in float64 and with random tables, and so is the recipe: results and gradients must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradscope.patching.graph import CASTS, cast_source
from gradscope.patching.idle import why_idle
from gradscope.patching.match import Argument, Match, Of
from gradscope.patching.matchers.rotation import Layout, layout_of, rotations
from gradscope.patching.matchers.rotation_proof import Rotation, RotationForm
from gradscope.patching.views import is_view
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "rope"


def matches(recording: Recording) -> Iterator[Match]:
    """Every tensor that is turned; where a part of it is turned and put together with the rest, that as a whole."""
    inside: set[Node] = set()
    known: dict[object, RotationForm | None] = {}
    for node in reversed(recording.nodes):
        if node in inside or not node.outputs or _only_shows(node):
            continue
        for rotation in rotations(node.output):
            layout = layout_of(rotation, known)
            if layout is not None and not _is_inside_helper(rotation):
                inside |= rotation.nodes
                yield _match(_with_cast(rotation), layout)
                break


def _is_inside_helper(rotation: Rotation) -> bool:
    """Return whether a table is made in a function further down, so that the result's own function cannot read it."""
    made_in = rotation.y.producer.places[:1] if rotation.y.producer is not None else ()
    for table in rotation.tables:
        home = table.producer.places[:1] if table.producer is not None else ()
        read_in = [node.places[0].frame for node in table.users if node in rotation.nodes and node.places]
        if home and made_in and home[0].frame is not made_in[0].frame and home[0].frame in read_in:
            return True
    return False


def _only_shows(node: Node) -> bool:
    """Return whether it reshapes a tensor of four dimensions: that may stand far from where it was turned."""
    return is_view(node) and len(node.inputs[0].shape) == 4


def _with_cast(rotation: Rotation) -> Rotation:
    """From before a cast of the tensor on, where that is for the rotation only."""
    source = cast_source(rotation.x)
    node = rotation.x.producer
    if source is None or node is None or source.dtype != rotation.y.dtype or rotation.x.alive:
        return rotation
    if not set(rotation.x.users) <= rotation.nodes:
        return rotation
    return Rotation(source, rotation.y, rotation.nodes | {node}, rotation.tables)


def _match(rotation: Rotation, layout: Layout) -> Match:
    turned = ".transpose(1, 2)" if layout.tokens_first else ""
    arguments = [Argument("", (Of(rotation.x, "x", turned),))]
    (cos, part), (sin, other) = layout.tables
    arguments.append(Argument("", (Of(cos, "cos", part),)))
    minus = ("-",) if layout.backwards else ()
    arguments.append(Argument("", (*minus, Of(sin, "sin", other, bracketed=layout.backwards))))
    if layout.interleaved:
        arguments.append(Argument("interleaved", ("True",)))
    if layout.rotary:
        arguments.append(Argument("rotary", (Of(cos, "cos", ".shape[-1]"),)))
    if _promotes(rotation):
        arguments.append(Argument("promote", ("True",)))
    reasons = list(layout.reasons)
    if rotation.y.dtype != rotation.x.dtype:
        reasons.append("the result has another dtype than the tensor that is turned")
    suffix = turned
    if layout.stride != rotation.y.strides and _is_viewed(rotation.y):
        if rotation.y.strides == _contiguous(rotation.y.shape):
            suffix += ".contiguous()"
        else:
            reasons.append("the result is viewed in a form that depends on how it lies in memory")
    return Match(
        RECIPE,
        "rope",
        tuple(arguments),
        frozenset(rotation.nodes),
        rotation.y,
        suffix=suffix,
        reasons=reasons,
        idle=why_idle(RECIPE, rotation.y, features=math.prod(rotation.y.shape)),
    )


def _promotes(rotation: Rotation) -> bool:
    """Return whether the tables' dtype, where it is another, becomes the result's: nothing is cast."""
    made = {table.producer.op for table in rotation.tables if table.producer is not None}
    return CASTS.isdisjoint(made | {node.op for node in rotation.nodes})


def _is_viewed(value: Value) -> bool:
    """Return whether a view is taken that is only possible in some layouts of memory."""
    left = list(value.users)
    while left:
        node = left.pop()
        if node.outputs and node.op in {"view", "view_as_complex"}:
            return True
        if node.outputs and (is_view(node) or node.op in CASTS):
            left += node.output.users
    return False


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
