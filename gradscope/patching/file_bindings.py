"""What a file gives to a name of its own or to an attribute: whether that may be another thing next time."""

from __future__ import annotations

import ast

from gradscope.patching.source import FunctionSource, SourceFile
from gradscope.patching.syntax import is_name

# They take an attribute's name first.
_BY_NAME = frozenset({"add_module", "register_module", "set_submodule", "__setattr__"})


def is_given(name: str, own: str | None, file: SourceFile) -> bool:
    """Whether a name of the file was given what has another one, as ``ACT = F.silu``: next time it may be another.

    Args:
        own: the name of what it is.
    """
    for part in ast.walk(file.tree):
        if isinstance(part, ast.Global) and name in part.names:
            return True
        if isinstance(part, ast.ImportFrom) and _imports_another(part, name, own):
            return True
        if isinstance(part, (ast.Assign, ast.AnnAssign)) and _is_of_the_file(part, file):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            stored = any(is_name(each, name) for target in targets for each in ast.walk(target))
            if stored and not _makes(part.value, name):
                return True
    return False


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


def assigned(name: str, source: FunctionSource) -> list[ast.expr]:
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


def may_be_set(name: str, source: FunctionSource) -> bool:
    """Whether the file gives attributes by names that may be this one, as ``setattr(self, kind, act)`` does."""
    for part in ast.walk(source.file.tree):
        if not isinstance(part, ast.Call):
            continue
        if is_name(part.func, "setattr"):
            named = part.args[1:2]
        elif isinstance(part.func, ast.Attribute) and part.func.attr in _BY_NAME:
            named = part.args[:1]
        else:
            continue
        if any(not isinstance(each, ast.Constant) or each.value == name for each in named):
            return True
    return False


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
