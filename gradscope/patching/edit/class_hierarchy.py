"""Classes above, below and beside the one whose method is edited: which of them have another method or attribute."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from typing import Any

from gradscope.patching.edit.source import SourceFile
from gradscope.patching.edit.syntax import is_name, walked
from gradscope.recording.graph import Frame

_EVERY, _ELSE = "__getattribute__", "__getattr__"  # the second gives a module its parts
_LIBRARIES = frozenset({"torch", "builtins"})


def home(frame: Frame) -> type:
    """Return the class that defines the method of ``frame``, of the module that runs it."""
    owner = type(frame.owner)
    return next((each for each in owner.__mro__ if _defines(each, frame)), owner)


def _defines(kind: type, frame: Frame) -> bool:
    return any(getattr(held, "__code__", None) is frame.code for held in vars(kind).values())


def is_widened_elsewhere(frame: Frame) -> bool:
    """Return whether a loaded class of another module derives from the one that defines ``frame``'s method."""
    own = home(frame)
    return any(each.__module__ != own.__module__ for each in _derived(own))


def related(own: type, file: SourceFile, names: Mapping[str, Any]) -> list[ast.ClassDef]:
    """Return the classes of ``file`` whose methods may run on a module of ``own`` or of a class that derives from it.

    Of a class whose base is not known by ``names``, those of the file, nothing else is known: it is one of them.
    """
    family = {each.__name__ for kind in (own, *_derived(own)) for each in kind.__mro__}
    classes = [part for part in walked(file.tree) if isinstance(part, ast.ClassDef)]
    widening: set[ast.ClassDef] = set()
    for each in classes:
        bases = [_base(base, names) for base in each.bases]
        if any(base is None or issubclass(base, own) for base in bases):
            widening.add(each)
            family |= {above.__name__ for base in bases if base is not None for above in base.__mro__}
    return [each for each in classes if each in widening or each.name in family]


def other_method(name: str, frame: Frame, file: SourceFile) -> str | None:
    """Return the name of a class that has another method ``name`` than the class of the method that ``frame`` runs.

    A class that derives from it, is loaded or stands in its ``file``; None where there is none.
    """
    own = home(frame)
    held = _member(own, name)
    for kind in _derived(own):
        if _member(kind, name) is not held or _member(kind, _EVERY) is not _member(own, _EVERY):
            return kind.__name__
    above = {each.__name__ for each in own.__mro__}
    others = (each for each in related(own, file, frame.globals) if each.name not in above)
    return next((each.name for each in others if {name, _EVERY} & _members(each)), None) or _made_by_type(name, file)


def is_of_a_class(name: str, frame: Frame, file: SourceFile) -> bool:
    """Return whether a class that the module may be of has a member ``name``, which goes before its own modules."""
    own, before = home(frame), {name, _EVERY, _ELSE}
    kinds = (each for kind in (own, *_derived(own)) for each in kind.__mro__)
    if any(before & vars(each).keys() for each in kinds if each.__module__.partition(".")[0] not in _LIBRARIES):
        return True
    written = (_members(each) for each in related(own, file, frame.globals))
    return any(before & each for each in written) or bool(_made_by_type(name, file))


def _made_by_type(name: str, file: SourceFile) -> str | None:
    """Return the name of a class made by ``type("Sub", (Net,), {...})`` that may have such a member."""
    for call in walked(file.tree):
        if not isinstance(call, ast.Call) or not is_name(call.func, "type") or len(call.args) != 3:
            continue
        members = call.args[2]
        keys = members.keys if isinstance(members, ast.Dict) else [None]
        if any(not isinstance(key, ast.Constant) or key.value in {name, _EVERY, _ELSE} for key in keys):
            return ast.unparse(call.args[0]).strip("'")
    return None


def _member(kind: type, name: str) -> object:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _members(written: ast.ClassDef) -> set[str]:
    """Return the names that the body of a class binds."""
    found: set[str] = set()
    for part in written.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(part.name)
        elif not isinstance(part, ast.AnnAssign) or part.value is not None:
            found |= {
                each.id for each in walked(part) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def _derived(kind: type) -> Iterator[type]:
    below: list[type] = type.__subclasses__(kind)
    for each in below:
        yield each
        yield from _derived(each)


def _base(expression: ast.expr, names: Mapping[str, Any]) -> type | None:
    if isinstance(expression, ast.Subscript):  # Generic[T]
        expression = expression.value
    found = named(expression, names)
    return found if isinstance(found, type) else None


def named(expression: ast.expr, names: Mapping[str, Any]) -> object:
    """Return what ``nn.SiLU`` is; None where ``expression`` is no chain of names."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id, getattr(builtins, expression.id, None))
    if isinstance(expression, ast.Attribute):
        return getattr(named(expression.value, names), expression.attr, None)
    return None
