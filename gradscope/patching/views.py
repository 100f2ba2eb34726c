"""Calls that only show a tensor in another form, done again on another tensor."""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor

from gradscope import ops
from gradscope.recording.graph import Node, Value

# Done again on a tensor of other strides as_strided would show other numbers.
VIEWS = (ops.VIEWS - {"as_strided"}) | ops.names("contiguous clone repeat repeat_interleave")


def is_view(node: Node) -> bool:
    """Return whether a call gives the numbers of one tensor in another form, or some of them, or some several times."""
    return node.op in VIEWS and len(node.inputs) == 1 and not node.changed


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
        made = node.function(*_with(node.args, below), **_with(node.kwargs, below))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    found = [made] if isinstance(made, Tensor) else list(made)
    index = node.outputs.index(value)
    return found[index] if index < len(found) and isinstance(found[index], Tensor) else None


def called(tensor: Tensor, suffix: str) -> Tensor | None:
    """``tensor`` after the methods that a match calls on an operand; None where there is more to it."""
    return _called(tensor, ast.parse(f"tensor{suffix}", mode="eval").body)


def _called(tensor: Tensor, expression: ast.expr) -> Tensor | None:
    if isinstance(expression, ast.Name):
        return tensor
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Attribute):
        return None
    below = _called(tensor, expression.func.value)
    made = below if below is None else getattr(below, expression.func.attr)(*map(ast.literal_eval, expression.args))
    return made if isinstance(made, Tensor) else None


def _with(arguments: Any, tensor: Tensor) -> Any:
    if isinstance(arguments, Value):
        return tensor
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_with(each, tensor) for each in arguments)
    if isinstance(arguments, dict):
        return {name: _with(each, tensor) for name, each in arguments.items()}
    return arguments
