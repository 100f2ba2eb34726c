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
    home,
    is_another_module,
    is_changed,
    is_given,
    is_of_a_class,
    is_set_by_name,
    is_set_from_outside,
    is_widened_elsewhere,
    may_be_set,
    named,
    other_method,
    related,
)
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.source import Refusal, SourceFile, SourceGuard
from gradscope.patching.edit.syntax import is_name
from gradscope.recording.graph import Frame, Node

# What of a torch module says what it does, where matchers take it as given.
_SETTINGS: dict[type, tuple[str, ...]] = {
    nn.Softmax: ("dim",),
    nn.LogSoftmax: ("dim",),
    nn.GELU: ("approximate",),
    nn.Embedding: ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"),
}


def settings_of(module: object) -> tuple[str, ...]:
    """Return the names of the settings that say what a module of torch's does, and that the new code may not read."""
    return _SETTINGS.get(type(module), ())


def check_called_by_name(node: Node, calls: CallSites) -> None:
    """Raise Refusal where a function was called that something held which may hold another: ``self.act(x)``."""
    call = calls.spelled(node)
    function = _value_bound_to(call.func, calls) if isinstance(call, ast.Call) else None
    if function is not None and not _is_named(function, calls):
        raise Refusal(f"{node.op} is not called by its own name")


def _is_named(function: ast.expr, calls: CallSites) -> bool:
    """Return whether ``function`` is one of torch's, called by its name, or a tensor's method."""
    held = _value(function, calls)
    if isinstance(function, ast.Name):
        return not _is_local(function, calls) and not is_given(function.id, _name(held), calls.source.file)
    if not isinstance(function, ast.Attribute):
        return False
    above = _value(function.value, calls)
    if isinstance(above, ModuleType):
        if is_another_module(_root(function), function, calls.source.file):
            return False
        return above.__name__.partition(".")[0] == "torch" or _name(held) == function.attr
    if isinstance(held, nn.Module) or calls.is_tensor(function.value):
        return True
    if isinstance(above, type):
        return issubclass(above, Tensor)
    if isinstance(function.value, ast.Name):  # of a comprehension, that goes over tensors
        return above is None and not _is_local(function.value, calls)
    return not isinstance(function.value, ast.Attribute)  # of what another call made


def check_helper(frame: Frame, call: ast.AST | None, calls: CallSites) -> None:
    """Raise Refusal where the user's function that ``frame`` is of may be another one next time: ``self.act(x)``."""
    if not isinstance(call, ast.Call):
        return
    function = _value_bound_to(call.func, calls)
    own = frame.code.co_name
    if isinstance(function, ast.Attribute):
        above = _value(function.value, calls)
        held = not isinstance(above, (ModuleType, type)) and function.attr in getattr(above, "__dict__", {})
        may_change = held or function.attr != own or is_set_from_outside(own, calls.source.file)  # Own.do = other
    elif isinstance(function, ast.Name) and _is_local(function, calls):
        may_change = _is_held(function, calls)
    else:
        may_change = not isinstance(function, ast.Name) or is_given(function.id, own, calls.source.file)
    if may_change:
        raise Refusal(f"{own} is not called by its own name")


def check_method(called: ast.AST | None, calls: CallSites) -> None:
    """Raise Refusal where a class below the module's own has another method, or property, than ``called``."""
    function = _value_bound_to(called.func, calls) if isinstance(called, ast.Call) else called
    if not isinstance(function, ast.Attribute):
        return
    above = function.value
    by_class = isinstance(above, ast.Attribute) and above.attr == "__class__" and _is_own(above, calls)
    if not by_class and not _is_own(function, calls):  # Own.method(self), super().method()
        return
    own, file = home(calls.frame), calls.source.file
    if hasattr(own, function.attr):
        check_not_replaced(function.attr, calls.frame, file)
    other = other_method(function.attr, calls.frame, file)
    if other is not None:
        raise Refusal(f"{function.attr} is defined in {own.__name__}, but overridden in {other}")


def check_not_replaced(method: str, frame: Frame, file: SourceFile) -> None:
    """Raise Refusal where the file gives a module of ``frame``'s class another method: ``self.forward = other``."""
    others = related(home(frame), file, frame.globals)
    if assigned(method, file, others) or is_set_by_name(method, file, others):
        raise Refusal(f"{method} is not called by its own name")


def callee_to_ask(node: Node, module: nn.Module, calls: CallSites) -> ast.expr | None:
    """Return what was called for a module of torch's, as ``self.act``; None where it always is one of that class."""
    if calls.is_of_parent(node):  # the module's own class says which
        return None
    call = calls.expression(node)
    return _expression_to_ask(call.func, module, calls) if isinstance(call, ast.Call) else None


def helper_to_ask(frame: Frame, module: nn.Module, call: ast.AST | None, calls: CallSites) -> ast.expr | None:
    """Return what was called for a module of the user's own; None where it always is one of that class.

    Args:
        frame: of the module's method.
        call: what stands where it was called, in the function of ``calls``.
    """
    if not isinstance(call, ast.Call):
        return None
    function = call.func
    if isinstance(function, ast.Attribute):
        held, above = _value(function, calls), _value(function.value, calls)
        if isinstance(above, type) and getattr(held, "__code__", None) is frame.code:  # Own.forward(self.own, x)
            return None
        if above is module and function.attr == frame.code.co_name:  # self.act.forward(x)
            function = function.value
    return _expression_to_ask(function, module, calls)


def _expression_to_ask(function: ast.expr, module: nn.Module, calls: CallSites) -> ast.expr | None:
    """Return the expression whose class must be that of ``module``; None where it always is.

    Raises:
        Refusal: it cannot be asked before, or is a container, whose parts may be others.
    """
    function = _value_bound_to(function, calls)
    if isinstance(function, ast.Attribute) and function.attr == "__call__":
        function = function.value
    if _is_new(function, module, calls):
        return None
    held = _value(function, calls)
    if _is_own(function, calls) and is_changed(function.attr, calls.source.file):
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may contain different modules in another call")
    if isinstance(held, nn.Module) and _is_own(function, calls) and _is_always_alike(function.attr, held, calls):
        return None
    other = held is not None and held is not module  # in a Sequential, say
    if other or isinstance(module, nn.Sequential) or not _is_path(function, calls):
        raise Refusal(f"line {function.lineno}: {ast.unparse(function)} may contain different modules in another call")
    return function


def identity_guard(call: ast.Call, calls: CallSites) -> SourceGuard | None:
    """Return the condition that what ``call`` calls, an ``nn.Identity``, still is one; None where it always is.

    Raises:
        Refusal: that cannot be asked before.
    """
    module = calls.called_module(call)
    assert isinstance(module, nn.Module)
    expression = _expression_to_ask(call.func, module, calls)
    if expression is None:
        return None
    text, name = calls.source.file.of(expression), name_of(type(module), calls)
    if name is None:
        raise Refusal(f"line {expression.lineno}: {text} may be a module of a different class in another call")
    return SourceGuard(expression, f"type({text}) is {name}")


_LEGACY = frozenset({"size_average", "reduce"})  # they say what a loss's reduction is


def made_in_place(call: ast.AST, module: object, calls: CallSites) -> ast.Call | None:
    """Return the expression that makes ``module``, a new one at each call: ``CrossEntropyLoss()`` of what it calls."""
    made = call.func if isinstance(call, ast.Call) else None
    if not isinstance(made, ast.Call) or not isinstance(module, nn.Module) or any(module.children()):
        return None
    return made if _is_new(made, module, calls) else None


def setting_of(name: str, made: ast.Call, module: nn.Module) -> ast.expr | None:
    """Return what ``made``, which makes ``module``, sets ``name`` to; None where it leaves that to the default.

    Raises:
        Refusal: it unpacks its arguments, or one that torch has no more use for sets another.
    """
    names = list(inspect.signature(type(module)).parameters)
    given: dict[str | None, ast.expr] = {each.arg: each.value for each in made.keywords}
    given.update(zip(names, made.args, strict=False))
    unpacked = None in given or any(isinstance(each, ast.Starred) for each in made.args)
    if unpacked or any(_literal(given[each]) is not None for each in _LEGACY & given.keys()):
        raise Refusal(f"line {made.lineno}: cannot interpret the arguments of {type(module).__name__}")
    return given.get(name)


def is_written(name: str, function: ast.expr, module: nn.Module, calls: CallSites) -> bool:
    """Return whether the setting ``name`` is a literal wherever the class makes the module that ``function`` holds."""
    function, file = _value_bound_to(function, calls), calls.source.file
    if _may_change(name, file):
        return False
    made: list[ast.expr] = [function]
    if _is_own(function, calls):
        if not _is_always_alike(function.attr, module, calls):
            return False
        made = assigned(function.attr, file, related(home(calls.frame), file, calls.frame.globals))
    return bool(made) and all(_is_new(each, module, calls) and _has_written(name, each, module) for each in made)


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


def _is_own(expression: ast.expr, calls: CallSites) -> TypeGuard[ast.Attribute]:
    """Return whether ``expression`` is an attribute of the module itself: ``self.act``."""
    first = calls.frame.code.co_varnames[:1]
    return isinstance(expression, ast.Attribute) and bool(first) and is_name(expression.value, first[0])


def _value_bound_to(function: ast.expr, calls: CallSites) -> ast.expr:
    """Return what a local name holds that is bound once, or on all ways here; any other expression as it is."""
    if isinstance(function, ast.Name) and function.id in calls.frame.code.co_varnames:
        found = calls.source.bound_on_all_ways(function)
        homes = [found] if found is not None else calls.source.assignments(function)
        named = [home for home in homes if isinstance(home.targets[0], ast.Name)]
        return named[0].value if len(named) == 1 else function
    return function


def _is_local(name: ast.Name, calls: CallSites) -> bool:
    code = calls.frame.code
    return name.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def _is_held(name: ast.Name, calls: CallSites) -> bool:
    """Return whether a local name was given its function: what the code itself defines is always the same."""
    source = calls.source
    stored = any(isinstance(each.ctx, ast.Store) for each in source.names(name.id))
    return name.id in calls.frame.code.co_freevars or name.id in source.arguments or stored


def _root(expression: ast.expr) -> str:
    """Return the name that a chain of attributes begins with; empty where it begins with a call."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def _name(held: object) -> str | None:
    return getattr(held, "__name__", None)


def _is_path(expression: ast.expr, calls: CallSites) -> bool:
    """Return whether ``expression`` can be asked anywhere before: attributes and items of an argument or a global."""
    if isinstance(expression, ast.Attribute):
        return _is_path(expression.value, calls)
    if isinstance(expression, ast.Subscript):
        place = expression.slice.operand if isinstance(expression.slice, ast.UnaryOp) else expression.slice
        return _is_path(expression.value, calls) and (isinstance(place, ast.Constant) or _is_path(place, calls))
    if not isinstance(expression, ast.Name):
        return False
    if not _is_local(expression, calls):
        return True
    stored = any(isinstance(each.ctx, ast.Store) for each in calls.source.names(expression.id))
    return not stored and expression.id in calls.source.arguments


def _value(expression: ast.expr, calls: CallSites) -> object:
    """Return what a chain of names is, of the file's too; None where it is not known."""
    if isinstance(expression, ast.Name) and not _is_local(expression, calls):
        return calls.frame.globals.get(expression.id)
    found = calls.attribute(expression)
    if found is None and isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, calls), expression.attr, None)
    return found


def _is_always_alike(name: str, module: nn.Module, calls: CallSites) -> bool:
    """Return whether all that the class assigns to ``name`` is a new module like ``module``, with like parts."""
    file, names = calls.source.file, calls.frame.globals
    values = assigned(name, file, related(home(calls.frame), file, names))
    if not values or may_be_set(name, file) or is_widened_elsewhere(calls.frame):
        return False
    if is_of_a_class(name, calls.frame, file):
        return False
    return all(_is_new(value, module, calls) for value in values)


def _is_new(value: ast.expr, module: nn.Module, calls: CallSites) -> bool:
    if not isinstance(value, ast.Call) or named(value.func, calls.frame.globals) is not type(module):
        return False
    own = type(module).__name__
    if isinstance(value.func, ast.Attribute):
        if value.func.attr != own:  # Config.act()
            return False
        if is_another_module(_root(value.func), value, calls.source.file):
            return False
    if isinstance(value.func, ast.Name) and is_given(value.func.id, own, calls.source.file):
        return False
    if not isinstance(module, nn.Sequential):
        return True
    parts = list(module)
    return len(value.args) == len(parts) and all(
        _is_new(given, part, calls) and _is_set_up(given, part, calls)
        for given, part in zip(value.args, parts, strict=True)
    )


def _is_set_up(call: ast.expr, module: nn.Module, calls: CallSites) -> bool:
    """Return whether ``call`` writes all settings of a module in a container, which no name reaches."""
    return all(
        _has_written(name, call, module) and not _may_change(name, calls.source.file) for name in settings_of(module)
    )


def _may_change(setting: str, file: SourceFile) -> bool:
    return is_set_from_outside(setting, file) or may_be_set(setting, file)  # each.dim = 1


def name_of(kind: type, calls: CallSites) -> str | None:
    """Return the name of ``kind`` in the file of ``calls``, as ``nn.SiLU``; None where no name surely is."""
    names, own, file = calls.frame.globals, kind.__name__, calls.source.file
    if names.get(own) is kind and not is_given(own, own, file):
        return own
    inside = next(ast.iter_child_nodes(calls.source.definition))
    for library, path in ((nn, own), (torch, f"nn.{own}")) if getattr(nn, own, None) is kind else ():
        for name, held in names.items():
            if held is library and not is_another_module(name, inside, file):
                return f"{name}.{path}"
    return next((name for name, held in names.items() if held is kind and not is_given(name, own, file)), None)
