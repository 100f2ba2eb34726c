"""What a pattern calls: torch's function by its name, or something that an attribute holds and may be another one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.patching.recording import Frame, Node
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource
from gradscope.patching.syntax import is_name
from gradscope.patching.texts import Texts
from gradscope.tree import modules_of


def check_named(node: Node, texts: Texts) -> None:
    """Raises Refusal where a function was called that an attribute or an argument held: ``self.act(x)``."""
    call = texts.spelled(node)
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Name) and function.id in texts.frame.code.co_varnames:
        bound = [home.value for home in texts.source.assignments(function) if isinstance(home.targets[0], ast.Name)]
        function = bound[0] if len(bound) == 1 else None
        if not isinstance(function, ast.Attribute):
            raise Refusal(f"{node.op} is not called by its own name")
    if not isinstance(function, ast.Attribute):
        return
    held, above = texts.attribute(function), texts.attribute(function.value)
    if held is not None and not isinstance(held, nn.Module) and not isinstance(above, (Tensor, ModuleType)):
        raise Refusal(f"{node.op} is not called by its own name")


def configured(node: Node, module: nn.Module, texts: Texts) -> ast.expr | None:
    """``self.act``, where its class does not say that it is always one of the class of ``module``."""
    expression = texts.module(node)
    first = texts.frame.code.co_varnames[:1]
    if not isinstance(expression, ast.Attribute) or not first or not is_name(expression.value, first[0]):
        return None
    if _always(expression.attr, module, texts):
        return None
    if isinstance(module, nn.Sequential):
        raise Refusal(f"line {expression.lineno}: {ast.unparse(expression)} may hold other modules next time")
    return expression


def configured_on_the_way(frame: Frame, module: nn.Module, call: ast.AST | None, texts: Texts) -> ast.expr | None:
    """``self.act`` of a call of the user's own module, where the class does not say that it always is one of its kind.

    Args:
        frame: of the module's method.
        call: what stands where it was called, in the function of ``texts``.
    """
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Name):
        bound = [home.value for home in texts.source.assignments(function) if isinstance(home.targets[0], ast.Name)]
        function = bound[0] if len(bound) == 1 else None
    if isinstance(function, ast.Attribute) and function.attr == frame.code.co_name:  # self.act.forward(x)
        above = texts.attribute(function.value)
        function = function.value if above is module else function
    first = texts.frame.code.co_varnames[:1]
    if not isinstance(function, ast.Attribute) or not first or not is_name(function.value, first[0]):
        return None
    held = texts.attribute(function)
    if not isinstance(held, nn.Module) or module not in modules_of(held) or _always(function.attr, held, texts):
        return None
    if held is not module:  # in a Sequential, say
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may hold other modules next time")
    return function


def _always(name: str, module: nn.Module, texts: Texts) -> bool:
    """Whether all that the class gives the attribute is a new module of that kind, with parts of the same kinds."""
    return all(_is_new(value, module, texts.frame.globals) for value in _assigned(name, texts.source))


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
    """All that the class of a method gives an attribute of ``self``."""
    above: ast.AST | None = source.definition
    while above is not None and not isinstance(above, ast.ClassDef):
        above = source.file.parents.get(above)
    found: list[ast.expr] = []
    for part in ast.walk(above) if above is not None else ():
        if isinstance(part, ast.AnnAssign) and part.value is not None:
            found += _given(part.target, part.value, name)
        elif isinstance(part, ast.Assign):
            found += [value for target in part.targets for value in _given(target, part.value, name)]
    return found


def _given(target: ast.expr, value: ast.expr, name: str) -> list[ast.expr]:
    """What an assignment gives the attribute: its part of ``self.a, self.b = nn.A(), nn.B()``."""
    if isinstance(target, ast.Attribute):
        return [value] if target.attr == name else []
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
