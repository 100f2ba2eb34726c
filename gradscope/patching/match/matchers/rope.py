"""Rotary positions by hand: pairs of features turned by tables of cosines and sines, in whatever spelling.

What a spelling does is not read off its form. The calls between a tensor and its turned self are run again, on random
numbers in float64 and with random tables, and so is the recipe: results and gradients must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.ops import CASTS
from gradscope.patching.match.graph import REPLAYABLE_VIEWS, cast_source, filled, is_view, remade, replayed
from gradscope.patching.match.match import Argument, Match, Of, why_idle
from gradscope.recipes.rope import rope
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "rope"


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every tensor that is rotated; where a part is rotated and joined to the rest, the whole."""
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
    """Extend the match to a cast in front that serves the rotation only."""
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
        reasons.append("the result's dtype differs from that of the rotated tensor")
    suffix = turned
    if layout.stride != rotation.y.strides and _is_viewed(rotation.y):
        if rotation.y.strides == _contiguous(rotation.y.shape):
            suffix += ".contiguous()"
        else:
            reasons.append("the result is viewed in a shape that depends on its memory layout")
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


# Which calls may turn a tensor, and by what tables: a search backwards.


_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "neg", "cat", "stack", "hstack", "addcmul"})
_COMPLEX = frozenset({"view_as_complex", "view_as_real"})
_MOST = 40  # calls of a rotation; Hugging Face's has 8


@dataclass(frozen=True, eq=False)
class Layout:
    """How the recipe is to be called."""

    tables: tuple[tuple[Value, str], ...]  # cos and sin: a tensor, what brings it to the recipe's shape
    interleaved: bool
    backwards: bool  # by the negative angle
    rotary: bool  # whether the number of features has to be said: that of a doubled table
    tokens_first: bool  # [batch, tokens, heads, size]
    stride: tuple[int, ...]  # of the result
    reasons: tuple[str, ...] = ()


def rotations(y: Value) -> Iterator[Rotation]:
    """Yield the tensors of ``y``'s shape from which alone, and tables, it is made; the nearest first."""
    if len(y.shape) != 4 or not y.requires_grad or not y.dtype.is_floating_point:
        return
    frontier, nodes, tables = {y}, set[Node](), dict[object, Value]()
    while len(nodes) < _MOST:
        value = max(frontier, key=lambda each: -1 if each.producer is None else each.producer.index)
        if len(frontier) == 1 and len(tables) in (1, 2) and value.shape == y.shape and _may_turn(nodes):
            yield Rotation(value, y, frozenset(nodes), tuple(tables.values()))
        node = value.producer
        if node is None or node.changed or node.op not in _ARITHMETIC | _COMPLEX | REPLAYABLE_VIEWS | CASTS:
            return
        nodes.add(node)
        frontier.remove(value)
        frontier = {each for each in frontier if each.producer is not node}
        for read in node.inputs[:1] if node.op in CASTS else node.inputs:
            if read.requires_grad:
                frontier.add(read)
            elif read.dtype.is_floating_point or read.dtype.is_complex:
                table = _plain(read, nodes)
                tables[key_of(table)] = table
            else:
                return
        if len(tables) > 2 or not frontier:
            return


def _plain(table: Value, nodes: set[Node]) -> Value:
    """The table itself, of one with its sign changed; the change goes into ``nodes``."""
    node = table.producer
    if node is None or node.op != "neg" or node.changed:
        return table
    nodes.add(node)
    return node.inputs[0]


def _may_turn(nodes: set[Node]) -> bool:
    ops = {node.op for node in nodes}
    return "mul" in ops and not ops.isdisjoint({"neg", "sub", "rsub", "view_as_complex"})


def layout_of(rotation: Rotation, known: dict[object, RotationForm | None]) -> Layout | None:
    """Return how the recipe does the same; None where it does not. ``known`` has what was tried before."""
    axes = _axes(rotation)
    if axes is None:
        return None
    form = _form(rotation)
    if form not in known:
        known[form] = next((way for way in _ways(rotation) if proves(rotation, way, *axes)), None)
    way = known[form]
    return None if way is None else _layout(rotation, way, *axes)


def _form(rotation: Rotation) -> object:
    """Return what is equal for rotations by the same calls on the same shapes."""
    numbers: dict[Value, object] = {rotation.x: "x"}
    tables = [key_of(table) for table in rotation.tables]

    def numbered(arguments: Any) -> Any:
        if isinstance(arguments, Value):
            return str(numbers[arguments] if arguments in numbers else f"table {tables.index(key_of(arguments))}")
        if isinstance(arguments, (tuple, list)):
            return [numbered(each) for each in arguments]
        if isinstance(arguments, dict):
            return {name: numbered(each) for name, each in arguments.items()}
        return arguments

    calls = []
    for node in sorted(rotation.nodes, key=lambda node: node.index):
        args = node.args[:1] if node.op in CASTS else node.args
        calls.append((node.op, repr(numbered(args)), repr(numbered({} if node.op in CASTS else node.kwargs))))
        for value in node.outputs:
            numbers[value] = len(numbers)
    return (rotation.x.shape, rotation.tables[0].shape, tuple(calls), numbers[rotation.y])


def _ways(rotation: Rotation) -> Iterator[RotationForm]:
    size, width = rotation.x.shape[-1], rotation.tables[0].shape[-1]
    for interleaved in (False, True):
        for doubled in (False, True):
            if width * (1 if doubled else 2) > size or (doubled and width % 2):
                continue
            for swapped, backwards in ((False, False), (True, False), (False, True), (True, True)):
                if len(rotation.tables) == 2 or not (swapped or backwards):
                    yield RotationForm(swapped, interleaved, doubled, backwards)


def _axes(rotation: Rotation) -> tuple[bool, str] | None:
    """Return whether tokens come before heads, and what brings a table to [tokens, pairs] or [batch, tokens, pairs]."""
    shapes = {table.shape for table in rotation.tables}
    dtypes = {table.dtype for table in rotation.tables}
    if len(shapes) != 1 or len(dtypes) != 1:
        return None
    (shape,) = shapes
    batch, one, two, _ = rotation.x.shape
    rank = len(shape)
    if rank < 2 or rank > 4:
        return None
    first, second, third, _ = (1,) * (4 - rank) + tuple(shape)
    if first not in (1, batch):
        return None
    if (second, third) == (1, two):
        return False, "[:, 0]" if rank == 4 else ""
    strides = rotation.x.strides
    if (second, third) == (one, 1) and strides is not None and strides[1] >= strides[2]:  # the outer one is the tokens
        return True, "[:, :, 0]" if rank == 4 else "[:, 0]"
    return None


def _layout(rotation: Rotation, way: RotationForm, tokens_first: bool, part: str) -> Layout | None:
    tables = rotation.tables[::-1] if way.swapped else rotation.tables
    reasons: list[str] = []
    named: tuple[tuple[Value, str], ...]
    if len(tables) == 1:
        named = ((tables[0], f"{part}.real"), (tables[0], f"{part}.imag"))
        if rotation.x.device.type == "cpu":
            reasons.append("on a CPU the recipe uses the same complex multiplication as this code")
    else:
        named = ((tables[0], part), (tables[1], part))
    if way.doubled and not all(_is_doubled(table, way.interleaved) for table in tables):
        return None
    x = rotation.x
    like = torch.empty_strided(x.shape, x.strides or (), device="meta")
    like = torch.empty_like(like.transpose(1, 2) if tokens_first else like)
    stride = (like.transpose(1, 2) if tokens_first else like).stride()
    rotary = way.doubled and tables[0].shape[-1] != x.shape[-1]
    return Layout(named, way.interleaved, way.backwards, rotary, tokens_first, tuple(stride), tuple(reasons))


def _is_doubled(table: Value, interleaved: bool) -> bool:
    """Return whether a table holds every angle twice."""
    made = remade(table)
    if made is None:  # whose numbers are gone: its views may say it, as repeat_interleave does
        root = table
        while root.producer is not None and is_view(root.producer):
            root = root.producer.inputs[0]
        made = replayed(table, root, torch.arange(math.prod(root.shape)).view(root.shape))
    if made is None:
        return False
    half = made.shape[-1] // 2
    pairs = (made[..., ::2], made[..., 1::2]) if interleaved else (made[..., :half], made[..., half:])
    return torch.equal(*pairs)


# Proof that calls turn a tensor as the recipe does: both are run on random numbers in float64.


# What brings a table to [tokens, pairs] or [batch, tokens, pairs], as text and as an index.
_PARTS: dict[str, Any] = {"": ..., "[:, 0]": (slice(None), 0), "[:, :, 0]": (slice(None), slice(None), 0)}

_CLOSE = 1e-10  # float64 rounding of a few products of numbers near 1 is 1e-15


@dataclass(frozen=True, eq=False)
class Rotation:
    """The calls from ``x`` to ``y``, and the tensors without a gradient that they read beside."""

    x: Value
    y: Value
    nodes: frozenset[Node]
    tables: tuple[Value, ...]  # of each form in memory one


@dataclass(frozen=True)
class RotationForm:
    """A form of rotation."""

    swapped: bool  # the first table that was found is that of sines
    interleaved: bool
    doubled: bool
    backwards: bool


def proves(rotation: Rotation, way: RotationForm, tokens_first: bool, part: str) -> bool:
    """Return whether the calls and the recipe agree on random numbers, gradient included."""
    numbers = _Numbers()
    x = numbers.of(rotation.x.shape).requires_grad_()
    tables, angles = _random_tables(rotation, way, numbers)
    cos, sin = (each[_PARTS[part]] for each in angles)
    sin = -sin if way.backwards else sin
    rotary = cos.shape[-1] if way.doubled and cos.shape[-1] != x.shape[-1] else None
    try:
        with torch.enable_grad():
            made = _Again(rotation, x, tables).of(rotation.y)
            wanted = rope(
                x.transpose(1, 2) if tokens_first else x,
                cos,
                sin,
                interleaved=way.interleaved,
                rotary=rotary,
                backend="cpu",
            )
            wanted = wanted.transpose(1, 2) if tokens_first else wanted
            if made.shape != wanted.shape or not _agree(made, wanted):
                return False
            upstream = numbers.of(made.shape)
            (one,) = torch.autograd.grad(made, x, upstream)
            (other,) = torch.autograd.grad(wanted, x, upstream)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return _agree(one, other)


class _Numbers:
    """Random numbers in float64, the same every time, that leave torch's own alone."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def of(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _CLOSE)


def _random_tables(rotation: Rotation, way: RotationForm, numbers: _Numbers) -> tuple[list[Tensor], list[Tensor]]:
    """Return what stands for the tables in the calls, and as cosines and sines for the recipe."""
    shape = list(rotation.tables[0].shape)
    if way.doubled:
        shape[-1] //= 2
    found = [numbers.of(shape) for _ in range(2)]
    if way.doubled:
        found = [each.repeat_interleave(2, -1) if way.interleaved else torch.cat((each, each), -1) for each in found]
    if len(rotation.tables) == 1:
        return [torch.complex(*found)], found
    return (found[::-1] if way.swapped else found), found


class _Again:
    """The calls of a rotation on another tensor and other tables, without their casts."""

    def __init__(self, rotation: Rotation, x: Tensor, tables: list[Tensor]) -> None:
        self.rotation, self.made = rotation, {rotation.x: x}
        self.tables = dict(zip(map(key_of, rotation.tables), tables, strict=True))

    def of(self, value: Value) -> Tensor:
        if value in self.made:
            return self.made[value]
        node = value.producer
        if node not in self.rotation.nodes or node is None:
            return self.tables[key_of(value)]
        if node.op in CASTS:
            return self.of(node.inputs[0])
        made = node.function(*filled(node.args, self.of), **filled(node.kwargs, self.of))
        for output, tensor in zip(node.outputs, [made] if isinstance(made, Tensor) else made, strict=True):
            self.made[output] = tensor
        return self.made[value]


def key_of(value: Value) -> object:
    """Return what is equal for tensors that the same views show."""
    views = []
    while (node := value.producer) is not None and is_view(node):
        views.append((node.op, node.outputs.index(value), repr(_shown(node.args)), repr(_shown(node.kwargs))))
        value = node.inputs[0]
    return value.content, *views


def _shown(arguments: Any) -> Any:
    if isinstance(arguments, Value):
        return "tensor"
    if isinstance(arguments, (tuple, list)):
        return [_shown(each) for each in arguments]
    if isinstance(arguments, dict):
        return {name: _shown(each) for name, each in arguments.items()}
    return arguments
