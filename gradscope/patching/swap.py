"""Puts rewritten methods on the modules that hold a site, and takes them off again.

A method runs while the modules whose calls it takes the place of are what they were when it was proved. What they hold,
as a weight or a share that is dropped, the new code reads itself. That a module was replaced by another kind, got a
hook, or has another setting than one that is read, is asked at each call, and the old code runs then.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from gradscope import recipes
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.guards import settings_read
from gradscope.patching.edit.imports import import_of, unread_imports
from gradscope.patching.edit.rewrite import Edit
from gradscope.patching.edit.side_effects import is_hooked
from gradscope.patching.edit.source import Definition, FunctionSource, Refusal, SourceFile, edited
from gradscope.patching.edit.syntax import INLINE, walked
from gradscope.patching.match.match import Match
from gradscope.patching.sites import Site, bound
from gradscope.tree import modules_of, named_modules_of


class Swap:
    """The rewritten methods of one module.

    The new method is an attribute of the instance, so that nothing but this module changes: not its class, not its
    parameters, buffers, hooks or state dict.
    """

    def __init__(self, module: nn.Module, sites: Iterable[Site], files: dict[str, SourceFile]) -> None:
        self.module = module
        self.sites = list(sites)
        self._plain = {site.chain[0].name for site in self.sites if not site.chain[0].bound}
        asked = unchanged(module, self.sites)
        self.methods = {
            name: _built(held, files) if name in self._plain else _shared(held, files, type(module), name, asked)
            for name, held in _by_method(self.sites)
        }
        self._held: dict[str, Any] = {}  # what the module itself had under these names

    @property
    def old_calls(self) -> int:
        """Return how many calls ran the module's own code since :meth:`put`, because something was not as proved."""
        return _old_calls.get(self.module, 0)

    def put(self) -> None:
        """Make the module run the rewritten methods."""
        _old_calls.pop(self.module, None)
        for name, function in self.methods.items():
            held = vars(self.module).get(name, function)
            if held is not function and getattr(held, "__func__", None) is not function:
                self._held[name] = held
            vars(self.module)[name] = function if name in self._plain else MethodType(function, self.module)

    def take_off(self) -> None:
        """Make the module run its own methods again; what somebody else put there since stays."""
        for name, function in self.methods.items():
            held = vars(self.module).get(name)
            if held is function or (isinstance(held, MethodType) and held.__func__ is function):
                if name in self._held:
                    vars(self.module)[name] = self._held.pop(name)
                else:
                    del vars(self.module)[name]


def swaps(sites: Iterable[Site], files: dict[str, SourceFile]) -> list[Swap]:
    """Make one swap for each module with a site; where the rewritten source does not compile, sites get the reason."""
    by_module: dict[nn.Module, list[Site]] = {}
    for site in sites:
        assert site.module is not None
        by_module.setdefault(site.module, []).append(site)
    made = []
    for module, held in by_module.items():
        try:
            made.append(Swap(module, held, files))
        except Refusal as refusal:
            for site in held:
                site.reasons.append(str(refusal))
    return made


def _by_method(sites: list[Site]) -> Iterator[tuple[str, list[Site]]]:
    names = dict.fromkeys(site.chain[0].name for site in sites)
    for name in names:
        yield name, [site for site in sites if site.chain[0].name == name]


def _built(sites: list[Site], files: dict[str, SourceFile], depth: int = 0) -> FunctionType:
    """Build the function at ``depth`` of the sites' chains, with their edits, and those it calls likewise."""
    function, wrappers = sites[0].chain[depth].function, sites[0].chain[depth].wrappers
    edits: list[Edit] = []
    names: dict[str, Any] = {}
    deeper: dict[str, list[Site]] = {}
    for site in sites:
        if len(site.chain) > depth + 1:
            deeper.setdefault(site.chain[depth + 1].name, []).append(site)
        elif site.edit is not None:
            edits.append(site.edit)
            names |= {known: getattr(recipes, name) for name, known in site.edit.imports}
    for name, held in deeper.items():
        names[name] = _built(held, files, depth + 1)
    made = rebuilt(function, FunctionSource.of(function.__code__, files), edits, names)
    for wrapper, inner in reversed([*zip(wrappers, [*wrappers, function][1:], strict=True)]):
        made = _wrapped(wrapper, inner, made)
    return made


# Calls that ran a module's own code since its swap was put, because something was not as proved. Not held by the swap:
# a method that did would keep the module alive, and modules share methods.
_old_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _shared(
    sites: list[Site], files: dict[str, SourceFile], kind: type[nn.Module], name: str, asked: tuple[Unchanged, ...]
) -> FunctionType:
    """Build the method, one for all modules of ``kind`` that have the same sites.

    Of as many methods as there are blocks, torch.compile would make as many graphs, up to a limit beyond which it
    compiles no more.
    """
    methods = files[sites[0].file].methods
    key = (kind, name, asked, tuple((site.edit.key if site.edit else None, site.chain) for site in sites))
    try:
        if key not in methods:
            methods[key] = _of_its_caller(_built(sites, files), name, asked)
        return methods[key]
    except TypeError:  # a forward that somebody made of an object without a hash
        return _of_its_caller(_built(sites, files), name, asked)


def _of_its_caller(function: FunctionType, name: str, asked: tuple[Unchanged, ...]) -> FunctionType:
    """Make ``function`` a method that an instance and its shallow copies hold, and that runs where ``asked`` holds.

    A replica of DataParallel's and what ``copy.copy`` makes have the attributes of the original, and so its method,
    which is bound to that. Who calls it has the right module as its own first argument. Calls for which ``asked`` does
    not hold are counted.
    """

    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patched = self
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            first = caller.f_locals.get(caller.f_code.co_varnames[0]) if caller.f_code.co_argcount else None
            if type(first) is type(self) and first is not self and vars(first).get(name) is vars(self).get(name):
                self = first
        if not all(each.holds(self) for each in asked):
            if not torch.compiler.is_compiling():
                _old_calls[patched] = _old_calls.get(patched, 0) + 1
            return getattr(type(self), name)(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    return cast(FunctionType, method)


def _wrapped(wrapper: FunctionType, inner: FunctionType, new: FunctionType) -> FunctionType:
    """Make what a decorator made of ``inner`` of ``new``: the same code with one free name bound anew."""
    cells = tuple(CellType(new) if inner in bound(cell) else cell for cell in wrapper.__closure__ or ())
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, new)
    return made


# Modules whose calls the new code takes the place of: it runs while they are what they were when it was proved.
#
# What they hold, as a weight or a share that is dropped, the new code reads itself. That a module was replaced by
# another kind, got a hook, or has another setting than one that is read, is asked at each call, and the old code runs
# then.


_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Unchanged:
    """One module below the one that is patched.

    Attributes:
        names: the way to it.
        kind: its class.
        settings: those that the new code does not read.
        parts: the names of what it holds.
        runs: its forward: that of its class, or one that somebody gave this module alone.
    """

    names: tuple[str, ...]
    kind: type[nn.Module]
    settings: tuple[tuple[str, Any], ...]
    parts: tuple[str, ...]
    runs: Any

    def holds(self, root: nn.Module) -> bool:
        """Return whether it is so below ``root``."""
        module: Any = root
        for name in self.names:
            module = module._modules.get(name)
            if module is None:
                return False
        if type(module) is not self.kind or is_hooked(module) or tuple(module._modules) != self.parts:
            return False
        if _runs(module) is not self.runs:
            return False
        return all(getattr(module, name, None) == value for name, value in self.settings)


def unchanged(root: nn.Module, sites: Iterable[Site]) -> tuple[Unchanged, ...]:
    """Return what must hold below ``root`` for the new code of ``sites``."""
    sites = list(sites)
    paths = {module: path for path, module in named_modules_of(root)}
    read: dict[nn.Module, set[str]] = {}
    for site in sites:
        for match in site.matches:
            for module in _called(match):
                if module is not root and module in paths:
                    read.setdefault(module, set()).update(settings_read(match, module))
    for module in {module for site in sites for module in _identities(site)}:
        if module is not root and module in paths:
            read.setdefault(module, set())
    own = {module for site in sites for match in site.matches for module in _on_the_way(match, root)}
    # Of the user's own modules numbers that matter were refused or are asked for; others, as counters, may change.
    settings = {module: _settings(module, names) for module, names in read.items()}
    settings |= {module: () for module in own if module in paths and module not in read}
    return tuple(
        Unchanged(tuple(paths[module].split(".")), type(module), given, tuple(module._modules), _runs(module))
        for module, given in settings.items()
    )


def _called(match: Match) -> Iterable[nn.Module]:
    """Yield the modules of torch whose calls go, with their parts; a layer that the new code calls itself stays one."""
    for node in match.nodes | match.optional | match.later:
        if isinstance(node.caller, nn.Module) and not isinstance(node.caller, nn.Linear):
            yield from modules_of(node.caller)


def _identities(site: Site) -> Iterator[nn.Module]:
    """The ``nn.Identity`` whose calls go, of which none is recorded: in the replaced text, and in helpers."""
    if site.edit is None:
        return
    edited, files = site.edit.source, {site.edit.source.file.name: site.edit.source.file}
    made = {place.frame.code: (place, node) for match in site.matches for node in match.nodes for place in node.places}
    for code, (place, node) in made.items():
        if code.co_name in INLINE or place.frame.owner is None:
            continue
        source = FunctionSource.of(code, files)
        calls = CallSites(source, place.frame, [], node)
        for part in walked(source.definition):
            if source.definition is not edited.definition or _is_replaced(part, site.edit):
                held = calls.called_module(part) if isinstance(part, ast.Call) else None
                if isinstance(held, nn.Identity):
                    yield held


def _is_replaced(part: ast.AST, edit: Edit) -> bool:
    start = edit.source.file.start(part) if isinstance(part, ast.expr) else -1
    return any(each.start <= start < each.end for each in edit.replacements)


def _on_the_way(match: Match, root: nn.Module) -> Iterable[nn.Module]:
    """Yield the user's own modules below ``root`` whose methods made the calls that go."""
    for node in match.nodes | match.optional | match.later:
        owners = [place.frame.owner for place in node.places]
        if root in owners:
            yield from (owner for owner in owners[: owners.index(root)] if owner is not None and owner is not root)


def _runs(module: nn.Module) -> Any:
    """Return the module's forward.

    It is asked as an attribute, of which torch.compile guards that it stays; that a name is missing in ``__dict__`` it
    does not.
    """
    held: Any = module.forward
    return held.__func__ if getattr(held, "__self__", None) is module else held


def _settings(module: nn.Module, read: set[str]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in read | {"training"} and not name.startswith("_") and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


# The edited text compiled: same globals, defaults and closure, recipes as new free names; and the file's text.


_FUTURE = 0x1FF0000  # the compiler flags of ``from __future__`` lie here in co_flags


def rebuilt(
    function: FunctionType, source: FunctionSource, edits: Iterable[Edit], names: Mapping[str, Any]
) -> FunctionType:
    """Return ``function`` with ``edits`` made in its body; ``names`` are what its new text calls beside its globals.

    Raises:
        Refusal: the edited text does not compile.
    """
    text = edited(source.file.text, [part for edit in edits for part in edit.replacements])
    free = frozenset({*names, *function.__code__.co_freevars})
    key = (source.definition, text, free)
    code = source.file.compiled.get(key)
    if code is None:
        name = _listed(text, source.file.name)
        definition = _found(_parsed(text, name), source)
        code = source.file.compiled[key] = _compiled(definition, source, free, name, function.__code__)
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells = tuple(held[free] if free in held else CellType(names[free]) for free in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = dict(function.__annotations__)
    made.__doc__, made.__qualname__, made.__module__ = function.__doc__, function.__qualname__, function.__module__
    made.__dict__.update(function.__dict__)
    return made


def _listed(text: bytes, file: str) -> str:
    """Return the file name under which tracebacks find the edited text."""
    lines = lines_of(text.decode())
    for number in itertools.count(1):
        name = f"<gradscope {file}>" if number == 1 else f"<gradscope {file} {number}>"
        if name not in linecache.cache or linecache.getlines(name) == lines:
            break
    linecache.cache[name] = (len(text), None, lines, name)
    return name


def _parsed(text: bytes, name: str) -> ast.Module:
    try:
        return ast.parse(text, name)
    except SyntaxError as error:
        raise Refusal(f"the edited source does not compile: {error}") from error


def _found(tree: ast.Module, source: FunctionSource) -> Definition:
    """Return the definition that stands where the original's stood among all of that name."""
    wanted = [node for node in ast.walk(source.file.tree) if isinstance(node, Definition)]
    found = [node for node in ast.walk(tree) if isinstance(node, Definition)]
    if len(wanted) != len(found):
        raise Refusal("the edit adds or removes a function")
    return found[wanted.index(source.definition)]


def _compiled(
    definition: Definition, source: FunctionSource, free: frozenset[str], name: str, old: CodeType
) -> CodeType:
    """Compile ``definition`` inside a function that has the ``free`` names and, for a method, its class."""
    definition.decorator_list = []
    body: list[ast.stmt] = [definition]
    above = source.file.parents[source.definition]
    while above is not source.file.tree and not isinstance(above, (ast.ClassDef, ast.FunctionDef)):
        above = source.file.parents[above]
    outer = ast.parse("def _(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args = [ast.arg(arg=each) for each in sorted(free)]
    if isinstance(above, ast.ClassDef):  # names that begin with two underscores carry the class's
        around = ast.parse(f"class {above.name}: pass").body[0]
        assert isinstance(around, ast.ClassDef)
        around.body, body = body, [around]
    elif definition.name not in free:  # one that calls itself means what the file has by that name
        body.insert(0, ast.Global(names=[definition.name]))
    outer.body = body
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    whole = compile(module, name, "exec", flags=old.co_flags & _FUTURE, dont_inherit=True)
    for code in _nested(whole):
        if code.co_name == definition.name and code.co_firstlineno == definition.lineno and code.co_name != "_":
            return code
    raise Refusal(f"{definition.name} was not found in the edited source")


def _nested(code: CodeType) -> Iterable[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def in_file(file: SourceFile, edits: Iterable[Edit]) -> str:
    """Return the file's text with ``edits`` made, the recipes imported, and no import that only the old text read."""
    edits = list(edits)
    imports = sorted({pair for edit in edits for pair in edit.imports})
    replacements = [part for edit in edits for part in edit.replacements]
    added = import_of(file, imports) if imports else None
    if added is not None:
        replacements.append(added)
    text = edited(file.text, replacements).decode()
    gone = unread_imports(file, text)
    return edited(file.text, [*replacements, *gone]).decode() if gone else text


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends, as Python counts them: a form feed or U+2028 ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
