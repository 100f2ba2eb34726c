"""The edited text compiled: same globals, defaults and closure, recipes as new free names; and the file's text."""

from __future__ import annotations

import ast
import itertools
import linecache
import re
from collections.abc import Iterable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from gradscope.patching.edit.imports import import_of, unread_imports
from gradscope.patching.edit.replacement import Refusal, edited
from gradscope.patching.edit.rewrite import Edit
from gradscope.patching.edit.source import Definition, FunctionSource, SourceFile

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
