"""Callees of a match: a function of torch's by its name, or what an attribute holds and may be another next time."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from gradscope.patching.edit.bindings import (
    assigned,
    is_another_module,
    is_changed,
    is_given,
    is_set_by_name,
    is_set_from_outside,
    may_be_set,
)
from gradscope.patching.edit.call_sites import Texts
from gradscope.patching.edit.class_hierarchy import (
    home,
    is_of_a_class,
    is_widened_elsewhere,
    named,
    other_method,
    related,
)
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.edit.syntax import is_name
from gradscope.recording.graph import Frame, Node

# What of a torch module says what it does, where matchers take it as given.
_SETTINGS: dict[type, tuple[str, ...]] = {
    nn.Softmax: ("dim",),
    nn.LogSoftmax: ("dim",),
    nn.Embedding: ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"),
}


def settings_of(module: object) -> tuple[str, ...]:
    """Return the names of the settings that say what a module of torch's does, and that the new code may not read."""
    return _SETTINGS.get(type(module), ())


def check_named(node: Node, texts: Texts) -> None:
    """Raise Refusal where a function was called that something held which may hold another: ``self.act(x)``."""
    call = texts.spelled(node)
    function = _bound(call.func, texts) if isinstance(call, ast.Call) else None
    if function is not None and not _is_named(function, texts):
        raise Refusal(f"{node.op} is not called by its own name")


def _is_named(function: ast.expr, texts: Texts) -> bool:
    """Return whether ``function`` is one of torch's, called by its name, or a tensor's method."""
    held = _value(function, texts)
    if isinstance(function, ast.Name):
        return not _is_local(function, texts) and not is_given(function.id, _name(held), texts.source.file)
    if not isinstance(function, ast.Attribute):
        return False
    above = _value(function.value, texts)
    if isinstance(above, ModuleType):
        if is_another_module(_root(function), function, texts.source.file):
            return False
        return above.__name__.partition(".")[0] == "torch" or _name(held) == function.attr
    if isinstance(held, nn.Module) or texts.is_tensor(function.value):
        return True
    if isinstance(above, type):
        return issubclass(above, Tensor)
    if isinstance(function.value, ast.Name):  # of a comprehension, that goes over tensors
        return above is None and not _is_local(function.value, texts)
    return not isinstance(function.value, ast.Attribute)  # of what another call made


def check_helper(frame: Frame, call: ast.AST | None, texts: Texts) -> None:
    """Raise Refusal where the user's function that ``frame`` is of may be another one next time: ``self.act(x)``."""
    if not isinstance(call, ast.Call):
        return
    function = _bound(call.func, texts)
    own = frame.code.co_name
    if isinstance(function, ast.Attribute):
        above = _value(function.value, texts)
        held = not isinstance(above, (ModuleType, type)) and function.attr in getattr(above, "__dict__", {})
        may_change = held or function.attr != own or is_set_from_outside(own, texts.source.file)  # Own.do = other
    elif isinstance(function, ast.Name) and _is_local(function, texts):
        may_change = _is_held(function, texts)
    else:
        may_change = not isinstance(function, ast.Name) or is_given(function.id, own, texts.source.file)
    if may_change:
        raise Refusal(f"{own} is not called by its own name")


def check_method(called: ast.AST | None, texts: Texts) -> None:
    """Raise Refusal where a class below the module's own has another method, or property, than ``called``."""
    function = _bound(called.func, texts) if isinstance(called, ast.Call) else called
    if not isinstance(function, ast.Attribute):
        return
    above = function.value
    by_class = isinstance(above, ast.Attribute) and above.attr == "__class__" and _is_own(above, texts)
    if not by_class and not _is_own(function, texts):  # Own.method(self), super().method()
        return
    own, file = home(texts.frame), texts.source.file
    if hasattr(own, function.attr):
        check_kept(function.attr, texts.frame, file)
    other = other_method(function.attr, texts.frame, file)
    if other is not None:
        raise Refusal(f"{function.attr} is that of {own.__name__}, which {other} has another for")


def check_kept(method: str, frame: Frame, file: SourceFile) -> None:
    """Raise Refusal where the file gives a module of ``frame``'s class another method: ``self.forward = other``."""
    others = related(home(frame), file, frame.globals)
    if assigned(method, file, others) or is_set_by_name(method, file, others):
        raise Refusal(f"{method} is not called by its own name")


def configured(node: Node, module: nn.Module, texts: Texts) -> ast.expr | None:
    """Return what was called for a module of torch's, as ``self.act``; None where it always is one of that class."""
    if texts.is_of_parent(node):  # the module's own class says which
        return None
    call = texts.expression(node)
    return _asked(call.func, module, texts) if isinstance(call, ast.Call) else None


def configured_on_the_way(frame: Frame, module: nn.Module, call: ast.AST | None, texts: Texts) -> ast.expr | None:
    """Return what was called for a module of the user's own; None where it always is one of that class.

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
    """Return the expression whose class must be that of ``module``; None where it always is.

    Raises:
        Refusal: it cannot be asked before, or is a container, whose parts may be others.
    """
    function = _bound(function, texts)
    if isinstance(function, ast.Attribute) and function.attr == "__call__":
        function = function.value
    if _is_new(function, module, texts):
        return None
    held = _value(function, texts)
    if _is_own(function, texts) and is_changed(function.attr, texts.source.file):
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may hold other modules next time")
    if isinstance(held, nn.Module) and _is_own(function, texts) and _always(function.attr, held, texts):
        return None
    other = held is not None and held is not module  # in a Sequential, say
    if other or isinstance(module, nn.Sequential) or not _is_path(function, texts):
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may hold other modules next time")
    return function


def is_written(name: str, function: ast.expr, module: nn.Module, texts: Texts) -> bool:
    """Return whether the setting ``name`` is a literal wherever the class makes the module that ``function`` holds."""
    function, file = _bound(function, texts), texts.source.file
    if _may_change(name, file):
        return False
    made: list[ast.expr] = [function]
    if _is_own(function, texts):
        if not _always(function.attr, module, texts):
            return False
        made = assigned(function.attr, file, related(home(texts.frame), file, texts.frame.globals))
    return bool(made) and all(_is_new(each, module, texts) and _has_written(name, each, module) for each in made)


def _has_written(name: str, call: ast.expr, module: nn.Module) -> bool:
    if not isinstance(call, ast.Call) or any(isinstance(each, ast.Starred) for each in call.args):
        return False
    place = list(inspect.signature(type(module)).parameters).index(name)
    given = [each.value for each in call.keywords if each.arg in {None, name}] + call.args[place : place + 1]
    return all(_literal(each) == getattr(module, name) for each in given)


def _literal(expression: ast.expr) -> object:
    """Return the literal that ``expression`` is; else what equals no number."""
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return expression


def _is_own(expression: ast.expr, texts: Texts) -> TypeGuard[ast.Attribute]:
    """Return whether ``expression`` is an attribute of the module itself: ``self.act``."""
    first = texts.frame.code.co_varnames[:1]
    return isinstance(expression, ast.Attribute) and bool(first) and is_name(expression.value, first[0])


def _bound(function: ast.expr, texts: Texts) -> ast.expr:
    """Return what a local name that is bound once holds; any other expression as it is."""
    if isinstance(function, ast.Name) and function.id in texts.frame.code.co_varnames:
        homes = [home for home in texts.source.assignments(function) if isinstance(home.targets[0], ast.Name)]
        return homes[0].value if len(homes) == 1 else function
    return function


def _is_local(name: ast.Name, texts: Texts) -> bool:
    code = texts.frame.code
    return name.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _is_held(name: ast.Name, texts: Texts) -> bool:
    """Return whether a local name was given its function: what the code itself defines is always the same."""
    source = texts.source
    stored = any(isinstance(each.ctx, ast.Store) for each in source.names(name.id))
    return name.id in texts.frame.code.co_freevars or name.id in source.arguments or stored


def _root(expression: ast.expr) -> str:
    """Return the name that a chain of attributes begins with; empty where it begins with a call."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def _name(held: object) -> str | None:
    return getattr(held, "__name__", None)


def _is_path(expression: ast.expr, texts: Texts) -> bool:
    """Return whether ``expression`` can be asked anywhere before: attributes and items of an argument or a global."""
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
    """Return what a chain of names is, of the file's too; None where it is not known."""
    if isinstance(expression, ast.Name) and not _is_local(expression, texts):
        return texts.frame.globals.get(expression.id)
    found = texts.attribute(expression)
    if found is None and isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, texts), expression.attr, None)
    return found


def _always(name: str, module: nn.Module, texts: Texts) -> bool:
    """Return whether all that the class assigns to ``name`` is a new module like ``module``, with like parts."""
    file, names = texts.source.file, texts.frame.globals
    values = assigned(name, file, related(home(texts.frame), file, names))
    if not values or may_be_set(name, file) or is_widened_elsewhere(texts.frame):
        return False
    if is_of_a_class(name, texts.frame, file):
        return False
    return all(_is_new(value, module, texts) for value in values)


def _is_new(value: ast.expr, module: nn.Module, texts: Texts) -> bool:
    if not isinstance(value, ast.Call) or named(value.func, texts.frame.globals) is not type(module):
        return False
    own = type(module).__name__
    if isinstance(value.func, ast.Attribute):
        if value.func.attr != own:  # Config.act()
            return False
        if is_another_module(_root(value.func), value, texts.source.file):
            return False
    if isinstance(value.func, ast.Name) and is_given(value.func.id, own, texts.source.file):
        return False
    if not isinstance(module, nn.Sequential):
        return True
    parts = list(module)
    return len(value.args) == len(parts) and all(
        _is_new(given, part, texts) and _is_set_up(given, part, texts)
        for given, part in zip(value.args, parts, strict=True)
    )


def _is_set_up(call: ast.expr, module: nn.Module, texts: Texts) -> bool:
    """Return whether ``call`` writes all settings of a module in a container, which no name reaches."""
    return all(
        _has_written(name, call, module) and not _may_change(name, texts.source.file) for name in settings_of(module)
    )


def _may_change(setting: str, file: SourceFile) -> bool:
    return is_set_from_outside(setting, file) or may_be_set(setting, file)  # each.dim = 1


def name_of(kind: type, texts: Texts) -> str | None:
    """Return the name of ``kind`` in the file of ``texts``, as ``nn.SiLU``; None where no name surely is."""
    names, own, file = texts.frame.globals, kind.__name__, texts.source.file
    if names.get(own) is kind and not is_given(own, own, file):
        return own
    inside = next(ast.iter_child_nodes(texts.source.definition))
    for library, path in ((nn, own), (torch, f"nn.{own}")) if getattr(nn, own, None) is kind else ():
        for name, held in names.items():
            if held is library and not is_another_module(name, inside, file):
                return f"{name}.{path}"
    return next((name for name, held in names.items() if held is kind and not is_given(name, own, file)), None)
