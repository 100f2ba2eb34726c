"""Reading a recording backwards: numbers, casts, equations, and tensors that can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradscope.patching.recording import Node, Value

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
COPIES = frozenset({"contiguous", "clone"})

# These draw random numbers or depend on more than their arguments.
_NEW_EACH_TIME = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout", "normal", "uniform"}
    | {"multinomial", "randperm", "alpha_dropout", "feature_dropout"}
)


def number(argument: Any) -> float | None:
    """A Python number, or a tensor of one that still exists."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    if isinstance(argument, Value) and argument.shape == () and not argument.requires_grad:
        tensor = remade(argument)
        return None if tensor is None else float(tensor)
    return None


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by name or position."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def dimension(node: Node, position: int = 1, name: str = "dim") -> int | None:
    """A call's dimension, counted from the end: -1 is the last."""
    given = argument(node, position, name)
    rank = len(node.inputs[0].shape)
    return given - rank if isinstance(given, int) and given >= 0 else given if isinstance(given, int) else None


def cast_source(value: Value) -> Value | None:
    """What ``value`` is a cast to another float of, without change of device or form."""
    node = value.producer
    if node is None or node.op not in CASTS or not node.inputs or node.changed:
        return None
    source = node.inputs[0]
    same = source.shape == value.shape and source.device == value.device
    return source if same and source.dtype.is_floating_point and value.dtype.is_floating_point else None


def swaps_last_two(value: Value) -> Value | None:
    """What ``value`` is the transpose of, in its last two dimensions."""
    node = value.producer
    if node is None or not node.inputs:
        return None
    rank = len(value.shape)
    if node.op == "mT" or (node.op in {"T", "t"} and rank == 2):
        return node.inputs[0]
    if node.op == "transpose":
        given = {each % rank for each in _numbers([*node.args[1:], *node.kwargs.values()])}
        return node.inputs[0] if given == {rank - 1, rank - 2} else None
    if node.op == "permute":
        order = [each % rank for each in _numbers([*node.args[1:], *node.kwargs.values()])]
        return node.inputs[0] if order == [*range(rank - 2), rank - 1, rank - 2] else None
    return None


def _numbers(arguments: list[Any]) -> Iterator[int]:
    for each in arguments:
        if isinstance(each, int):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _numbers(list(each))


def made_from(value: Value) -> set[Value]:
    """The tensors that ``value`` depends on and that no recorded call made."""
    if value.producer is None:
        return {value}
    return {leaf for read in value.producer.inputs for leaf in made_from(read)}


def makers(value: Value) -> set[Node]:
    """The recorded calls that ``value`` comes from."""
    if value.producer is None:
        return set()
    found = {value.producer}
    for read in value.producer.inputs:
        found |= makers(read)
    return found


def remade(value: Value) -> Tensor | None:
    """The tensor itself, or made again from those that still exist; None where that cannot be done faithfully."""
    tensor = value.tensor()
    if tensor is not None and _unchanged(tensor, value):
        return tensor.detach()
    node = value.producer
    if node is None or node.op in _NEW_EACH_TIME or len(node.outputs) != 1:
        return None
    if node.changed and (
        not node.inputs or node.changed != {node.inputs[0].storage} or node.args[0] is not node.inputs[0]
    ):
        return None
    try:
        with torch.no_grad():
            args, kwargs = _remade_all(node.args), _remade_all(node.kwargs)
            if node.changed:
                args = (args[0].clone(), *args[1:])
            made = node.function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return None
    if node.op == "setitem":
        made = args[0]
    return made if isinstance(made, Tensor) else None


def _unchanged(tensor: Tensor, value: Value) -> bool:
    """What is put back after the run has another version, and the same content."""
    if value.kept is not None:
        return value.kept and value.same
    return tensor.is_inference() or tensor._version == value.content[1]


def _remade_all(arguments: Any) -> Any:
    if isinstance(arguments, Value):
        made = remade(arguments)
        if made is None:
            raise LookupError("a tensor that is gone")
        return made
    if isinstance(arguments, tuple):
        return tuple(_remade_all(each) for each in arguments)
    if isinstance(arguments, list):
        return [_remade_all(each) for each in arguments]
    if isinstance(arguments, dict):
        return {name: _remade_all(each) for name, each in arguments.items()}
    return arguments
