"""Bindings of a file's names, and classes around the edited one: what may be another object next time."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from typing import Any

from gradscope.patching.edit.source import SourceFile, bound_without_a_name
from gradscope.patching.edit.syntax import is_name, walked
from gradscope.recording.graph import Frame

# They take an attribute's name first.
_BY_NAME = frozenset({"add_module", "register_module", "set_submodule", "__setattr__"})
# They hold a module's attributes.
_HOLDERS = frozenset({"__dict__", "_modules"})
# What of a module says what it runs, and the methods that change what a container holds.
_OF_A_MODULE = frozenset({"forward", "__call__", "__class__"})
_CHANGING = _BY_NAME | {"append", "extend", "insert", "pop", "__setitem__", "__delitem__"}
# What goes over the parts of a module.
_OVER = frozenset({"modules", "children", "named_modules", "named_children"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_given(name: str, own: str | None, file: SourceFile) -> bool:
    """Return whether a global ``name``, which holds ``own``, may hold another thing next time: ``ACT = F.silu``.

    So it may where several statements of the file give it something, as the branches of an ``if`` do.

    Args:
        own: the name of what it is.
    """
    if name in file.declared_global:
        return True
    if any(isinstance(part, ast.ImportFrom) and _imports_another(part, name, own) for part in walked(file.tree)):
        return True
    made: set[str] = set()
    for part in file.outside_definitions:
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


def _makes(value: ast.expr | None, name: str) -> bool:
    """Return whether ``value`` is written out or has the name ``name``: a lambda, ``F.silu`` for ``silu``."""
    return isinstance(value, (ast.Lambda, ast.Constant)) or (isinstance(value, ast.Attribute) and value.attr == name)


def is_another_module(name: str, at: ast.AST, file: SourceFile) -> bool:
    """Return whether the imported ``name`` may be another module where ``at`` stands: after ``global F``, say.

    ``F = nn.functional`` is an import like any other.
    """
    if name in file.declared_global:
        return True
    imported: set[str] = set()
    for part in file.outside_definitions:
        if _binds(part, name):
            above = file.parents[part]
            if not isinstance(above, ast.Assign) or not _names_a_module(above.value):
                return True
            imported.add(ast.dump(above.value))
        imported |= _imports(part, name)
    scope: ast.AST | None = file.parents.get(at)
    while scope is not None and scope is not file.tree:
        inner = isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if inner and any(_binds(part, name) or _imports(part, name) for part in walked(scope)):
            return True
        scope = file.parents.get(scope)
    return len(imported) > 1


def _names_a_module(value: ast.expr) -> bool:
    """Return whether ``value`` is as ``nn.functional``, ``sys.modules["torch"]``, ``import_module("torch")``."""
    if isinstance(value, ast.Call):
        return bool(value.args) and all(isinstance(each, ast.Constant) for each in value.args) and not value.keywords
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and _names_a_module(value.value)
    return isinstance(value, ast.Name) or (isinstance(value, ast.Attribute) and _names_a_module(value.value))


def _binds(part: ast.AST, name: str) -> bool:
    """Return whether ``part`` binds ``name``, other than by an import."""
    if isinstance(part, ast.Name):
        return part.id == name and not isinstance(part.ctx, ast.Load)
    if isinstance(part, (ast.Import, ast.ImportFrom)):
        return False
    return (isinstance(part, ast.arg) and part.arg == name) or name in bound_without_a_name(part)


def _imports(part: ast.AST, name: str) -> set[str]:
    """Return what ``part`` imports as ``name``."""
    if not isinstance(part, (ast.Import, ast.ImportFrom)) or name not in bound_without_a_name(part):
        return set()
    of = f"{part.module}." if isinstance(part, ast.ImportFrom) else ""
    own = [each for each in part.names if (each.asname or each.name.partition(".")[0]) == name]
    return {of + (each.name if each.asname else name) for each in own}


def assigned(name: str, file: SourceFile, related: list[ast.ClassDef]) -> list[ast.expr]:
    """Return all that the file assigns to ``self.name`` in the classes ``related``, and to ``.name`` of anything else.

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
    """Return what is assigned to ``target``: its part of ``self.a, self.b = nn.A(), nn.B()``; else itself."""
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
    """Return whether the file sets attributes by names that may be ``name``, as ``setattr(self, kind, act)`` does."""
    if any(_holds_attributes(part) and _is_handed_on(part, file) for part in walked(file.tree)):
        return True
    return any(given is None or given == name for _, given in _given_by_name(file))


def is_set_by_name(name: str, file: SourceFile, related: list[ast.ClassDef]) -> bool:
    """Return whether the file sets ``name`` by ``setattr`` or its like, or one of the classes ``related`` any name."""
    for part, given in _given_by_name(file):
        if given == name or (given is None and _class_of(part, file) in related):
            return True
    return False


def _given_by_name(file: SourceFile) -> Iterator[tuple[ast.AST, object]]:
    """Yield where an attribute is set by its name, and that name; None where it is no literal."""
    for part in walked(file.tree):
        named: list[ast.expr] = []
        if isinstance(part, ast.Call) and is_name(part.func, "setattr"):
            named = part.args[1:2]
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            if part.func.attr in _BY_NAME:
                named = part.args[:1] + [each.value for each in part.keywords if each.arg in {None, "name"}]
            elif part.func.attr in {"update", "setdefault"} and _holds_attributes(part.func.value):
                yield part, None
        elif isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load) and _holds_attributes(part.value):
            named = [part.slice]
        yield from ((part, each.value if isinstance(each, ast.Constant) else None) for each in named)


def _is_handed_on(holder: ast.AST, file: SourceFile) -> bool:
    """Return whether ``holder`` gets another name, as ``held = vars(self)``: what is written there is not followed."""
    if isinstance(holder, ast.Attribute) and not isinstance(holder.ctx, ast.Load):
        return True
    return isinstance(file.parents[holder], (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return))


def _holds_attributes(expression: ast.AST) -> bool:
    """Return whether ``expression`` is as ``self.__dict__``, ``self._modules``, ``vars(self)``."""
    if isinstance(expression, ast.Call):
        return is_name(expression.func, "vars")
    return isinstance(expression, ast.Attribute) and expression.attr in _HOLDERS


def is_changed(name: str, file: SourceFile) -> bool:
    """Return whether the file changes what an attribute ``name`` holds, or what that runs: ``self.act[0] = other``."""
    others = _other_names(name, file)
    for part in walked(file.tree):
        if isinstance(part, ast.Call) and _sets_a_part(part) and _is_held(part.args[0], name, others, file):
            return True
        if not isinstance(part, (ast.Attribute, ast.Subscript)) or not _is_held(part.value, name, others, file):
            continue
        stored = not isinstance(part.ctx, ast.Load)
        if isinstance(part, ast.Subscript):
            if stored:
                return True
            continue
        if part.attr in (_OF_A_MODULE if stored else _CHANGING | _HOLDERS):
            return True
        # another's is the program's, not the class's
        if _is_hook(part.attr) and isinstance(part.value, ast.Attribute) and is_name(part.value.value, "self"):
            return True
    return False


def _is_held(expression: ast.expr, name: str, others: set[tuple[ast.AST, str]], file: SourceFile) -> bool:
    """Return whether ``expression`` may be what ``.name`` holds: ``net.act``, ``net.get_submodule("act")``."""
    if isinstance(expression, ast.Name):
        return (_function_of(expression, file), expression.id) in others
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        return expression.func.attr == "get_submodule"
    return isinstance(expression, ast.Attribute) and expression.attr == name


def _other_names(name: str, file: SourceFile) -> set[tuple[ast.AST, str]]:
    """Return the local names that hold what ``.name`` does: ``act = self.act``, ``for each in net.modules()``."""
    found: set[tuple[ast.AST, str]] = set()
    for part in walked(file.tree):
        given: list[ast.expr] = []
        if isinstance(part, (ast.For, ast.comprehension)):
            calls = (each.func for each in walked(part.iter) if isinstance(each, ast.Call))
            if any(isinstance(each, ast.Attribute) and each.attr in _OVER for each in calls):
                given = [part.target]
        elif isinstance(part, ast.Assign) and _is_held(part.value, name, set(), file):
            given = part.targets
        elif isinstance(part, ast.NamedExpr) and _is_held(part.value, name, set(), file):
            given = [part.target]
        names = (each for target in given for each in walked(target) if isinstance(each, ast.Name))
        found |= {(_function_of(each, file), each.id) for each in names if isinstance(each.ctx, ast.Store)}
    return found


def _sets_a_part(call: ast.Call) -> bool:
    """Return whether ``call`` is as ``setattr(act, "0", other)``: sets a part of a module, or what the module runs."""
    if not is_name(call.func, "setattr") or len(call.args) < 2:
        return False
    given = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
    return not isinstance(given, str) or given.isdigit() or given in _OF_A_MODULE


def is_set_from_outside(name: str, file: SourceFile) -> bool:
    """Return whether the file sets ``name`` of something else than ``self``: ``each.dim = 1``."""
    stored = (each for each in walked(file.tree) if isinstance(each, ast.Attribute) and each.attr == name)
    return any(not isinstance(each.ctx, ast.Load) and not is_name(each.value, "self") for each in stored)


def _is_hook(method: str) -> bool:
    return method.startswith("register_") and method.endswith("hook")


def _function_of(part: ast.AST, file: SourceFile) -> ast.AST:
    """Return the function around ``part``, or the file."""
    above = file.parents.get(part)
    while above is not None and not isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        above = file.parents.get(above)
    return above or file.tree


def _class_of(part: ast.AST, file: SourceFile) -> ast.ClassDef | None:
    """Return the class around ``part``."""
    above: ast.AST | None = part
    while above is not None and not isinstance(above, ast.ClassDef):
        above = file.parents.get(above)
    return above


# Classes above, below and beside the one whose method is edited: which of them have another method or attribute.


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
