"""Which calls may turn a tensor, and by what tables: a search backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradscope.patching.graph import CASTS, remade
from gradscope.patching.matchers.rotation_proof import Rotation, RotationForm, key_of, proves
from gradscope.patching.views import VIEWS, is_view, replayed
from gradscope.recording.graph import Node, Value

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
    """Tensors of ``y``'s shape from which alone, and tables, it is made; the nearest first."""
    if len(y.shape) != 4 or not y.requires_grad or not y.dtype.is_floating_point:
        return
    frontier, nodes, tables = {y}, set[Node](), dict[object, Value]()
    while len(nodes) < _MOST:
        value = max(frontier, key=lambda each: -1 if each.producer is None else each.producer.index)
        if len(frontier) == 1 and len(tables) in (1, 2) and value.shape == y.shape and _may_turn(nodes):
            yield Rotation(value, y, frozenset(nodes), tuple(tables.values()))
        node = value.producer
        if node is None or node.changed or node.op not in _ARITHMETIC | _COMPLEX | VIEWS | CASTS:
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
    """How the recipe does the same; None where it does not. ``known`` are forms that were tried before."""
    axes = _axes(rotation)
    if axes is None:
        return None
    form = _form(rotation)
    if form not in known:
        known[form] = next((way for way in _ways(rotation) if proves(rotation, way, *axes)), None)
    way = known[form]
    return None if way is None else _layout(rotation, way, *axes)


def _form(rotation: Rotation) -> object:
    """Equal for rotations by the same calls of tensors of the same shapes."""
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
            reasons.append("on a CPU the recipe is the product of complex numbers that stands here")
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
