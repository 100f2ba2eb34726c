"""Queries of a removed tensor's shape, dtype or device, which another tensor answers instead."""

from __future__ import annotations

import ast

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.expressions import bound_between, operand_of
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.syntax import names_in
from gradscope.patching.match import Match
from gradscope.recording.graph import Node, Value

_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})
_METHODS = frozenset({"size", "dim", "numel"})
_CASTS = frozenset({"to", "type_as"})


def is_asked_for_form(node: Node, value: Value) -> bool:
    """Return whether ``node`` reads the dtype and device of ``value`` alone, as ``mask.to(scores)`` does."""
    return node.op in _CASTS and len(node.inputs) == 2 and node.inputs[0] is not value


def only_forms(statement: ast.AST, names: set[str]) -> bool:
    """Return whether ``names`` occur in ``statement`` as ``x.shape``, ``x.size(...)``, ``y.to(x)`` and so on alone."""
    return all(_asked(part, names) for part in _uses(statement, names))


def _uses(statement: ast.AST, names: set[str]) -> list[tuple[ast.Name, ast.AST | None, ast.AST | None]]:
    """Return each occurrence, with what stands around it and around that."""
    found: list[tuple[ast.Name, ast.AST | None, ast.AST | None]] = []

    def walk(node: ast.AST, above: ast.AST | None, higher: ast.AST | None) -> None:
        if isinstance(node, ast.Name) and node.id in names:
            found.append((node, above, higher))
        for child in ast.iter_child_nodes(node):
            walk(child, node, above)

    walk(statement, None, None)
    return found


def _asked(use: tuple[ast.Name, ast.AST | None, ast.AST | None], names: set[str]) -> bool:
    name, above, higher = use
    if not isinstance(name.ctx, ast.Load) or not isinstance(above, ast.Attribute):
        return _is_cast(name, above)
    if above.attr in _ATTRIBUTES:
        return True
    called = isinstance(higher, ast.Call) and higher.func is above
    return called and above.attr in _METHODS


def _is_cast(name: ast.Name, above: ast.AST | None) -> bool:
    """Return whether ``name`` is the ``x`` of ``y.to(x)``."""
    if not isinstance(above, ast.Call) or above.args != [name] or above.keywords:
        return False
    return isinstance(above.func, ast.Attribute) and above.func.attr in _CASTS


def shape_queries(statement: ast.AST, inner: set[str], match: Match, calls: CallSites) -> list[tuple[ast.AST, str]]:
    """Return the parts of ``statement`` that ask one of the names ``inner`` for its shape, and their new text.

    Raises:
        Refusal: no tensor that stays has that shape, dtype or device.
    """
    return [_asked_elsewhere(name, above, higher, match, calls) for name, above, higher in _uses(statement, inner)]


def _asked_elsewhere(
    name: ast.Name, above: ast.AST | None, higher: ast.AST | None, match: Match, calls: CallSites
) -> tuple[ast.AST, str]:
    assert isinstance(above, (ast.Attribute, ast.Call)) and higher is not None
    refusal = Refusal(f"line {name.lineno} asks for the form of {name.id}, which is not made any more")
    like = match.like
    held = {
        place.names[name.id]
        for node in match.nodes
        if (place := node.place_in(calls.frame)) is not None and name.id in place.names
    }
    held = {value for value in held if value in match.inner}
    if like is None or not held or any(value.shape != like.shape for value in held):
        raise refusal
    if isinstance(above, ast.Call) or above.attr in {"dtype", "device"}:
        if any(value.dtype != like.dtype.dtype or value.device != like.dtype.device for value in held):
            raise refusal
        other = _name_of(like.dtype, name, match, calls)
        return (name, other) if isinstance(above, ast.Call) else (above, f"{other}.{above.attr}")
    index = None
    if above.attr == "shape" and isinstance(higher, ast.Subscript) and higher.value is above:
        index = _number(higher.slice)
    elif above.attr == "size" and isinstance(higher, ast.Call) and len(higher.args) == 1:
        index = _number(higher.args[0])
    size = like.sizes[index] if index is not None and -len(like.shape) <= index < len(like.shape) else None
    if size is None:
        raise refusal
    value, dimension = size
    return higher, f"{_name_of(value, name, match, calls)}.size({dimension})"


def _name_of(value: Value, near: ast.Name, match: Match, calls: CallSites) -> str:
    """Return a name that holds ``value`` where ``near`` is read."""
    expression, at = operand_of(value, match.nodes, calls)
    file = calls.source.file
    here, there = sorted([file.start(near), file.start(calls.expression(at))])
    plain = isinstance(expression, ast.Name) and not bound_between(expression, here, there, calls)
    if not plain or names_in(expression) & {near.id}:
        raise Refusal(f"line {near.lineno} asks for the form of {near.id}, which is not made any more")
    return file.of(expression)


def _number(expression: ast.expr) -> int | None:
    try:
        found = ast.literal_eval(expression)
    except ValueError:
        return None
    return found if isinstance(found, int) else None
