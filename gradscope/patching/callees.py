"""What a pattern calls: torch's function by its name, or something that an attribute holds and may be another one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gradscope.patching.recording import Frame, Node
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource
from gradscope.patching.syntax import is_name
from gradscope.patching.texts import Texts


def check_named(node: Node, texts: Texts) -> None:
    """Raises Refusal where a function was called that an attribute, a mapping or an argument held: ``self.act(x)``."""
    call = texts.spelled(node)
    function = _bound(call.func, texts) if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        held, above = texts.attribute(function), texts.attribute(function.value)
        if held is None or isinstance(held, nn.Module) or isinstance(above, (Tensor, ModuleType)):
            return
    elif function is None or (isinstance(function, ast.Name) and not _is_local(function, texts)):
        return
    raise Refusal(f"{node.op} is not called by its own name")


def check_helper(frame: Frame, call: ast.AST | None, texts: Texts) -> None:
    """Raises Refusal where the user's function that ``frame`` is of may be another one next time: ``self.act(x)``."""
    if not isinstance(call, ast.Call):
        return
    function = _bound(call.func, texts)
    if isinstance(function, ast.Attribute):
        above = texts.attribute(function.value)
        may_change = isinstance(above, nn.Module) and function.attr in vars(above)
    else:
        may_change = not isinstance(function, ast.Name) or _is_held(function, texts)
    if may_change:
        raise Refusal(f"{frame.code.co_name} is not called by its own name")


def configured(node: Node, module: nn.Module, texts: Texts) -> ast.expr | None:
    """What was called for a module of torch's, as ``self.act``; None where it always is one of that class."""
    if texts.is_of_parent(node):  # the module's own class says which
        return None
    call = texts.expression(node)
    return _asked(call.func, module, texts) if isinstance(call, ast.Call) else None


def configured_on_the_way(frame: Frame, module: nn.Module, call: ast.AST | None, texts: Texts) -> ast.expr | None:
    """What was called for a module of the user's own; None where it always is one of that class.

    Args:
        frame: of the module's method.
        call: what stands where it was called, in the function of ``texts``.
    """
    if not isinstance(call, ast.Call):
        return None
    function = call.func
    if isinstance(function, ast.Attribute):
        held, above = _value(function, texts), _value(function.value, texts)
        if isinstance(above, type) and getattr(held, "__code__", None) is frame.code:  # Own.forward(self.own, x)
            return None
        if above is module and function.attr == frame.code.co_name:  # self.act.forward(x)
            function = function.value
    return _asked(function, module, texts)


def _asked(function: ast.expr, module: nn.Module, texts: Texts) -> ast.expr | None:
    """The expression whose class must be that of ``module``; None where it always is.

    Raises:
        Refusal: it cannot be asked before, or is a container, whose parts may be others.
    """
    function = _bound(function, texts)
    if isinstance(function, ast.Attribute) and function.attr == "__call__":
        function = function.value
    if _is_new(function, module, texts.frame.globals):
        return None
    held = _value(function, texts)
    if isinstance(held, nn.Module) and _is_own(function, texts) and _always(function.attr, held, texts):
        return None
    other = held is not None and held is not module  # in a Sequential, say
    if other or isinstance(module, nn.Sequential) or not _is_path(function, texts):
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may hold other modules next time")
    return function


def _is_own(expression: ast.expr, texts: Texts) -> TypeGuard[ast.Attribute]:
    """``self.act``: an attribute of the module itself."""
    first = texts.frame.code.co_varnames[:1]
    return isinstance(expression, ast.Attribute) and bool(first) and is_name(expression.value, first[0])


def _bound(function: ast.expr, texts: Texts) -> ast.expr:
    """Of a name that is bound once, what that is."""
    if isinstance(function, ast.Name) and function.id in texts.frame.code.co_varnames:
        homes = [home for home in texts.source.assignments(function) if isinstance(home.targets[0], ast.Name)]
        return homes[0].value if len(homes) == 1 else function
    return function


def _is_local(name: ast.Name, texts: Texts) -> bool:
    code = texts.frame.code
    return name.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _is_held(name: ast.Name, texts: Texts) -> bool:
    """Whether a name of a function's own was given: what it defines itself with ``def`` is always the same."""
    source = texts.source
    stored = any(isinstance(each.ctx, ast.Store) for each in source.names(name.id))
    return name.id in texts.frame.code.co_freevars or name.id in source.arguments or stored


def _is_path(expression: ast.expr, texts: Texts) -> bool:
    """Whether it can be asked at any place before: attributes and items below what the function was given."""
    if isinstance(expression, ast.Attribute):
        return _is_path(expression.value, texts)
    if isinstance(expression, ast.Subscript):
        place = expression.slice.operand if isinstance(expression.slice, ast.UnaryOp) else expression.slice
        return _is_path(expression.value, texts) and (isinstance(place, ast.Constant) or _is_path(place, texts))
    if not isinstance(expression, ast.Name):
        return False
    if not _is_local(expression, texts):
        return True
    stored = any(isinstance(each.ctx, ast.Store) for each in texts.source.names(expression.id))
    return not stored and expression.id in texts.source.arguments


def _value(expression: ast.expr, texts: Texts) -> object:
    """What a chain of names is, of the file's too; None where it is not known."""
    if isinstance(expression, ast.Name) and not _is_local(expression, texts):
        return texts.frame.globals.get(expression.id)
    found = texts.attribute(expression)
    if found is None and isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, texts), expression.attr, None)
    return found


def _always(name: str, module: nn.Module, texts: Texts) -> bool:
    """Whether all that the class gives the attribute is a new module of that kind, with parts of the same kinds."""
    values = _assigned(name, texts.source)
    return bool(values) and all(_is_new(value, module, texts.frame.globals) for value in values)


def _is_new(value: ast.expr, module: nn.Module, names: Mapping[str, Any]) -> bool:
    if not isinstance(value, ast.Call) or _named(value.func, names) is not type(module):
        return False
    if not isinstance(module, nn.Sequential):
        return True
    parts = list(module)
    return len(value.args) == len(parts) and all(
        _is_new(given, part, names) for given, part in zip(value.args, parts, strict=True)
    )


def name_of(kind: type, names: Mapping[str, Any]) -> str | None:
    """What a class of torch's is called in a file, as ``nn.SiLU``."""
    for name, held in names.items():
        if held is kind:
            return name
    if getattr(nn, kind.__name__, None) is not kind:
        return None
    for library, path in ((nn, kind.__name__), (torch, f"nn.{kind.__name__}")):
        for name, held in names.items():
            if held is library:
                return f"{name}.{path}"
    return None


def _assigned(name: str, source: FunctionSource) -> list[ast.expr]:
    """All that the file gives an attribute of ``self``: a method's class, those that widen it, others from outside."""
    own = _class_of(source.definition, source)
    related = {own, *_widening(own, source)} if own is not None else {own}
    found: list[ast.expr] = []
    for part in ast.walk(source.file.tree):
        if isinstance(part, ast.AnnAssign) and part.value is not None:
            given = _given(part.target, part.value, name)
        elif isinstance(part, ast.Assign):
            given = [each for target in part.targets for each in _given(target, part.value, name)]
        else:
            continue
        others_own = given and _class_of(part, source) not in {None, *related}
        found += [value for target, value in given if not (others_own and is_name(target.value, "self"))]
    return found


def _class_of(part: ast.AST, source: FunctionSource) -> ast.ClassDef | None:
    """The class that something stands in."""
    above: ast.AST | None = part
    while above is not None and not isinstance(above, ast.ClassDef):
        above = source.file.parents.get(above)
    return above


def _widening(own: ast.ClassDef, source: FunctionSource) -> list[ast.ClassDef]:
    """The classes of the file that derive from one, by their names: a method of it is theirs too."""
    names, found = {own.name}, []
    for part in source.file.tree.body:  # a class stands behind those that it derives from
        if isinstance(part, ast.ClassDef) and any(is_name(base, name) for base in part.bases for name in names):
            names.add(part.name)
            found.append(part)
    return found


def _given(target: ast.expr, value: ast.expr, name: str) -> list[tuple[ast.Attribute, ast.expr]]:
    """What an assignment gives the attribute: its part of ``self.a, self.b = nn.A(), nn.B()``."""
    if isinstance(target, ast.Attribute):
        return [(target, value)] if target.attr == name else []
    if not isinstance(target, (ast.Tuple, ast.List)):
        return []
    paired = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
    values = value.elts if paired and isinstance(value, (ast.Tuple, ast.List)) else [value] * len(target.elts)
    return [each for part, held in zip(target.elts, values, strict=True) for each in _given(part, held, name)]


def _named(expression: ast.expr, names: Mapping[str, Any]) -> object:
    """What ``nn.SiLU`` is; None where it is no chain of names."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_named(expression.value, names), expression.attr, None)
    return None
