"""What a file gives to a name of its own or to an attribute: whether that may be another thing next time."""

from __future__ import annotations

import ast

from gradscope.patching.source import SourceFile
from gradscope.patching.syntax import is_name, walked

# They take an attribute's name first.
_BY_NAME = frozenset({"add_module", "register_module", "set_submodule", "__setattr__"})
# They hold a module's attributes.
_HOLDERS = frozenset({"__dict__", "_modules"})
# What of a module says what it runs, and the methods that change what a container holds.
_OF_A_MODULE = frozenset({"forward", "__call__", "__class__"})
_CHANGING = _BY_NAME | {"append", "extend", "insert", "pop", "__setitem__", "__delitem__"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_given(name: str, own: str | None, file: SourceFile) -> bool:
    """Whether a name of the file was given what has another one, as ``ACT = F.silu``: next time it may be another.

    So it may where several statements of the file give it something, as the branches of an ``if`` do.

    Args:
        own: the name of what it is.
    """
    made: set[str] = set()
    for part in walked(file.tree):
        if isinstance(part, ast.Global) and name in part.names:
            return True
        if isinstance(part, ast.ImportFrom) and _imports_another(part, name, own):
            return True
        if not _is_of_the_file(part, file):
            continue
        if isinstance(part, _DEFINITIONS) and part.name == name:
            made.add(ast.dump(part))
        elif isinstance(part, ast.ImportFrom):
            made |= {f"{part.module}.{each.name}" for each in part.names if (each.asname or each.name) == name}
        elif is_name(part, name) and isinstance(getattr(part, "ctx", None), ast.Store):
            above = file.parents[part]
            if not isinstance(above, (ast.Assign, ast.AnnAssign)) or not _makes(above.value, name):
                return True
            if not isinstance(above.value, ast.Constant):
                made.add(ast.dump(above))
    return len(made) > 1 or (not made and name != own)  # of "import *", or given by somebody else


def _imports_another(part: ast.ImportFrom, name: str, own: str | None) -> bool:
    if (part.module or "").partition(".")[0] == "torch":
        return False
    return any((alias.asname or alias.name) == name and alias.name != own for alias in part.names)


def _is_of_the_file(part: ast.AST, file: SourceFile) -> bool:
    """Whether it stands outside of functions and classes."""
    above = file.parents.get(part)
    while above is not None and not isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        above = file.parents.get(above)
    return above is None


def _makes(value: ast.expr | None, name: str) -> bool:
    """Whether what is assigned to ``name`` is written there, or has that name: a lambda, ``F.silu`` for ``silu``."""
    return isinstance(value, (ast.Lambda, ast.Constant)) or (isinstance(value, ast.Attribute) and value.attr == name)


def assigned(name: str, file: SourceFile, related: list[ast.ClassDef]) -> list[ast.expr]:
    """All that the file gives an attribute of ``self`` in the classes ``related``, and of anything from outside.

    Of a loop's name and its like it is the attribute itself.
    """
    found: list[ast.expr] = []
    for part in walked(file.tree):
        if not isinstance(part, ast.Attribute) or part.attr != name or isinstance(part.ctx, ast.Load):
            continue
        own = _class_of(part, file)
        if own is None or own in related or not is_name(part.value, "self"):
            found.append(_value_of(part, file))
    return found


def _value_of(target: ast.expr, file: SourceFile) -> ast.expr:
    """What an assignment gives a target: its part of ``self.a, self.b = nn.A(), nn.B()``; else the target itself."""
    above = file.parents[target]
    if isinstance(above, ast.Assign) and target in above.targets:
        return above.value
    if isinstance(above, ast.AnnAssign) and above.value is not None:
        return above.value
    if isinstance(above, (ast.Tuple, ast.List)):
        value = _value_of(above, file)
        if isinstance(value, (ast.Tuple, ast.List)) and value is not above and len(value.elts) == len(above.elts):
            return value.elts[above.elts.index(target)]
    return target


def may_be_set(name: str, file: SourceFile) -> bool:
    """Whether the file gives attributes by names that may be this one, as ``setattr(self, kind, act)`` does."""
    for part in walked(file.tree):
        named: list[ast.expr] = []
        if isinstance(part, ast.Call) and is_name(part.func, "setattr"):
            named = part.args[1:2]
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            if part.func.attr in _BY_NAME:
                named = part.args[:1] + [each.value for each in part.keywords if each.arg in {None, "name"}]
            elif part.func.attr in {"update", "setdefault"} and _holds_attributes(part.func.value):
                return True
        elif isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load) and _holds_attributes(part.value):
            named = [part.slice]
        elif isinstance(part, ast.Attribute) and part.attr in _HOLDERS and not isinstance(part.ctx, ast.Load):
            return True
        if any(not isinstance(each, ast.Constant) or each.value == name for each in named):
            return True
    return False


def _holds_attributes(expression: ast.expr) -> bool:
    """``self.__dict__``, ``self._modules``, ``vars(self)``."""
    if isinstance(expression, ast.Call):
        return is_name(expression.func, "vars")
    return isinstance(expression, ast.Attribute) and expression.attr in _HOLDERS


def is_changed(name: str, file: SourceFile) -> bool:
    """Whether the file changes what an attribute of that name holds, or what that runs: ``self.act[0] = other``."""
    for part in walked(file.tree):
        if not isinstance(part, (ast.Attribute, ast.Subscript)) or not isinstance(part.value, ast.Attribute):
            continue
        if part.value.attr != name:
            continue
        stored = not isinstance(part.ctx, ast.Load)
        if isinstance(part, ast.Subscript):
            if stored:
                return True
            continue
        if part.attr in (_OF_A_MODULE if stored else _CHANGING):
            return True
        if _is_hook(part.attr) and is_name(part.value.value, "self"):  # another's is the program's, not the class's
            return True
    return False


def is_set_from_outside(name: str, file: SourceFile) -> bool:
    """Whether the file gives something else than ``self`` an attribute of that name: ``each.dim = 1``."""
    stored = (each for each in walked(file.tree) if isinstance(each, ast.Attribute) and each.attr == name)
    return any(not isinstance(each.ctx, ast.Load) and not is_name(each.value, "self") for each in stored)


def _is_hook(method: str) -> bool:
    return method.startswith("register_") and method.endswith("hook")


def _class_of(part: ast.AST, file: SourceFile) -> ast.ClassDef | None:
    """The class that something stands in."""
    above: ast.AST | None = part
    while above is not None and not isinstance(above, ast.ClassDef):
        above = file.parents.get(above)
    return above
