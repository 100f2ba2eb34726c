"""Reading a recording backwards: numbers, casts, equations, views, and tensors that can be made again."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradscope import ops
from gradscope.ops import CASTS, COPIES
from gradscope.recording.graph import Node, Value
from gradscope.recording.operations import LIKE

# These draw random numbers or depend on more than their arguments.
_NEW_EACH_TIME = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout", "normal", "uniform"}
    | {"multinomial", "randperm", "alpha_dropout", "feature_dropout"}
)


# Calls by which a tensor is made again: a number or a mask takes a few.
_MOST_AGAIN = 1000


def number(argument: Any) -> float | None:
    """A Python number, or a tensor of one that still exists."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    if isinstance(argument, Value) and argument.shape == () and not argument.requires_grad:
        if argument.number is None:
            tensor = remade(argument)
            argument.number = (None if tensor is None else float(tensor),)
        return argument.number[0]
    return None


def constant(argument: Any) -> float | None:
    """A number, or a tensor of one that depends on no other than such tensors."""
    if not isinstance(argument, Value):
        return number(argument)
    return number(argument) if argument.shape == () and is_fixed(argument) else None


def is_half(dtype: torch.dtype) -> bool:
    """Tell a dtype of two bytes or fewer."""
    return dtype.itemsize < 4


def dimension(node: Node, position: int = 1, name: str = "dim") -> int | None:
    """A call's dimension, counted from the end: -1 is the last."""
    given = node.argument(position, name)
    rank = len(node.inputs[0].shape)
    return given - rank if isinstance(given, int) and given >= 0 else given if isinstance(given, int) else None


def cast_source(value: Value) -> Value | None:
    """Return what ``value`` is a cast of, from float to float, without change of device or shape."""
    node = value.producer
    if node is None or node.op not in CASTS or not node.inputs or node.changed:
        return None
    source = node.inputs[0]
    same = source.shape == value.shape and source.device == value.device
    return source if same and source.dtype.is_floating_point and value.dtype.is_floating_point else None


def uncast(value: Value) -> Value:
    """Return what a tensor was before casts and copies."""
    way = []
    while (source := value.uncast or _handed_on(value)) is not None:
        way.append(value)
        value = source
    for each in way:
        each.uncast = value
    return value


def _handed_on(value: Value) -> Value | None:
    node = value.producer
    if node is None or not node.inputs:
        return None
    if node.op in COPIES and not node.changed and node.inputs[0].shape == value.shape:
        return node.inputs[0]
    return cast_source(value)


def swaps_last_two(value: Value) -> Value | None:
    """Return what ``value`` is the transpose of, in its last two dimensions."""
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


def reached(value: Value) -> Iterator[Value]:
    """Yield ``value`` and all that it depends on, each once."""
    seen, left = {value}, [value]
    while left:
        each = left.pop()
        yield each
        for read in each.producer.inputs if each.producer is not None else ():
            if read not in seen:
                seen.add(read)
                left.append(read)


def made_from(value: Value) -> set[Value]:
    """The tensors that ``value`` depends on and that no recorded call made."""
    return {each for each in reached(value) if each.producer is None}


def makers(value: Value) -> set[Node]:
    """The recorded calls that ``value`` comes from."""
    return {each.producer for each in reached(value) if each.producer is not None}


def is_fixed(value: Value) -> bool:
    """Return whether it depends on tensors of one number without a gradient alone; looked up once for each."""
    left = [value]
    while left:
        each = left[-1]
        node = each.producer
        if node is None:
            each.fixed = each.shape == () and not each.requires_grad
        elif each.fixed is None:
            unknown = [read for read in node.inputs if read.fixed is None]
            if unknown and all(read.fixed is not False for read in node.inputs):
                left += unknown
                continue
            each.fixed = not unknown and all(read.fixed for read in node.inputs)
        left.pop()
    return bool(value.fixed)


def remade(value: Value) -> Tensor | None:
    """The tensor itself, or made again from those that still exist; None where that cannot be done faithfully."""
    made: dict[Value, Tensor] = {}
    left = [value]
    while left:
        each = left[-1]
        tensor = made.get(each)
        if tensor is None:
            tensor = _still_there(each)
        if tensor is None:
            node = each.producer
            is_none = each is not value and each.number == (None,)
            if node is None or is_none or not _can_run_again(node) or len(made) + len(left) > _MOST_AGAIN:
                return None
            forms = _forms_read(node)
            missing = [read for read in dict.fromkeys(node.inputs) if read not in made and read not in forms]
            if missing:
                left += missing
                continue
            tensor = _run_again(node, {**made, **forms})
            if tensor is None:
                return None
        made[each] = tensor
        left.pop()
    return made[value]


def _forms_read(node: Node) -> dict[Value, Tensor]:
    """Return tensors of any content for those that a call reads the shape of alone, as ``ones_like(scores)``."""
    if node.op not in LIKE or len(node.inputs) != 1:
        return {}
    (asked,) = node.inputs
    return {asked: torch.empty(asked.shape, dtype=asked.dtype, device=asked.device)}


def _still_there(value: Value) -> Tensor | None:
    if value.number is not None and value.number[0] is not None and value.dtype.is_floating_point:
        return torch.tensor(value.number[0], dtype=value.dtype, device=value.device)
    tensor = value.tensor()
    return tensor.detach() if tensor is not None and _unchanged(tensor, value) else None


def _can_run_again(node: Node) -> bool:
    if node.op in _NEW_EACH_TIME or len(node.outputs) != 1:
        return False
    if not node.changed:
        return True
    return bool(node.inputs) and node.changed == {node.inputs[0].storage} and node.args[0] is node.inputs[0]


def _run_again(node: Node, made: Mapping[Value, Tensor]) -> Tensor | None:
    try:
        with torch.no_grad():
            args, kwargs = filled(node.args, made.__getitem__), filled(node.kwargs, made.__getitem__)
            if node.changed:
                args = (args[0].clone(), *args[1:])
            result = node.function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return None
    if node.op == "setitem":
        result = args[0]
    return result if isinstance(result, Tensor) else None


def _unchanged(tensor: Tensor, value: Value) -> bool:
    """Check that a tensor holds what it did: what is put back after the run is another version of it."""
    if value.kept is not None:
        return value.kept and value.same
    return tensor.is_inference() or tensor._version == value.content[1]


def filled(argument: Any, tensor_of: Callable[[Value], Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """Return a recorded argument with a tensor in the place of each value; ``other`` changes what is neither."""
    if isinstance(argument, Value):
        return tensor_of(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument)(filled(each, tensor_of, other) for each in argument)
    if isinstance(argument, dict):
        return {name: filled(each, tensor_of, other) for name, each in argument.items()}
    return argument if other is None else other(argument)


# Calls that only show a tensor in another shape, done again on another tensor. Of other strides as_strided would show
# other numbers.
REPLAYABLE_VIEWS = (ops.VIEWS - {"as_strided"}) | COPIES | ops.names("repeat repeat_interleave")


def is_view(node: Node) -> bool:
    """Return whether a call gives one tensor's numbers in another shape, some of them, or some several times."""
    return node.op in REPLAYABLE_VIEWS and len(node.inputs) == 1 and not node.changed


def replayed(value: Value, root: Value, given: Tensor) -> Tensor | None:
    """What ``value`` would be if ``root``, from which views lead to it, had been ``given``; others are left out."""
    way = []
    while value is not root:
        node = value.producer
        if node is None or len(node.inputs) != 1:
            return None
        if is_view(node):
            way.append((node, value))
        value = node.inputs[0]
    shown = given
    for node, value in reversed(way):
        made = _again(node, value, shown)
        if made is None:
            return None
        shown = made
    return shown


def _again(node: Node, value: Value, below: Tensor) -> Tensor | None:
    """The output ``value`` of a view of ``below``."""
    try:
        made = node.function(*filled(node.args, lambda _: below), **filled(node.kwargs, lambda _: below))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    found = [made] if isinstance(made, Tensor) else list(made)
    index = node.outputs.index(value)
    return found[index] if index < len(found) and isinstance(found[index], Tensor) else None


def called(tensor: Tensor, suffix: str) -> Tensor | None:
    """Return ``tensor`` after the methods that a match calls on an operand; None where there is more to it."""
    return _called(tensor, ast.parse(f"tensor{suffix}", mode="eval").body)


def _called(tensor: Tensor, expression: ast.expr) -> Tensor | None:
    if isinstance(expression, ast.Name):
        return tensor
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Attribute):
        return None
    below = _called(tensor, expression.func.value)
    made = below if below is None else getattr(below, expression.func.attr)(*map(ast.literal_eval, expression.args))
    return made if isinstance(made, Tensor) else None
