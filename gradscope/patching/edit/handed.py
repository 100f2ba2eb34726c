"""What a helper function is handed for an argument, as its caller writes it."""

from __future__ import annotations

import ast

from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import is_fixed
from gradscope.recording.graph import Frame, Node


def handed(
    found: ast.expr, node: Node, inside: FunctionSource, frame: Frame, source: FunctionSource
) -> ast.expr | None:
    """What the function of ``frame`` hands a helper that it calls itself for ``found``, an argument of the helper's.

    Of an argument that is left out, its default, where that is written as a number. None where ``found`` is no
    argument, or may be bound anew, or how it is handed on is not plain.

    Args:
        node: a call in the helper.
        inside: the helper.
        source: of ``frame``.
    """
    if len(node.places) < 2 or node.places[1].frame is not frame or not isinstance(found, ast.Name):
        return None
    name, call = found.id, source.at(node.places[1].span)
    stored = any(not isinstance(each.ctx, ast.Load) for each in inside.names(name))
    if stored or name in inside.bound_otherwise or name in inside.not_local or not isinstance(call, ast.Call):
        return None
    given, called = inside.definition.args, call.func
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    defaults = dict(zip(reversed(names), reversed(given.defaults), strict=False))
    defaults |= {each.arg: at for each, at in zip(given.kwonlyargs, given.kw_defaults, strict=True) if at is not None}
    if isinstance(called, ast.Attribute) and node.places[0].frame.owner is not None:  # a module's own method
        names = names[1:]
    elif not isinstance(called, ast.Name):
        return None
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    written = dict(zip(names, call.args, strict=False)) | {each.arg or "": each.value for each in call.keywords}
    if name in written:
        return written[name]
    default = defaults.get(name)
    return default if default is not None and is_fixed(default) else None
