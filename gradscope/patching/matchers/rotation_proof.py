"""Proof that calls turn a tensor as the recipe does: both are run on random numbers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.patching.graph import CASTS
from gradscope.patching.views import is_view
from gradscope.recipes.rope import rope
from gradscope.recording.graph import Node, Value

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
    """What stands for the tables in the calls, and as cosines and sines for the recipe."""
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
        made = node.function(*self._with(node.args), **self._with(node.kwargs))
        for output, tensor in zip(node.outputs, [made] if isinstance(made, Tensor) else made, strict=True):
            self.made[output] = tensor
        return self.made[value]

    def _with(self, arguments: Any) -> Any:
        if isinstance(arguments, Value):
            return self.of(arguments)
        if isinstance(arguments, (tuple, list)):
            return type(arguments)(self._with(each) for each in arguments)
        if isinstance(arguments, dict):
            return {name: self._with(each) for name, each in arguments.items()}
        return arguments


def key_of(value: Value) -> object:
    """Equal for tensors that the same views show."""
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
