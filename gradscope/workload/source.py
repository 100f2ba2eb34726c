"""What a Python file is, read from its syntax tree: a file is never run to find out."""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Literal

from gradscope.errors import TargetError
from gradscope.inputs import UnreadableError, read_bytes
from gradscope.safe_text import shown_path

Kind = Literal["workload", "module-level", "script"]

FACTORY = "workload"


def file_kind(path: str | Path) -> Kind:
    """How gradscope uses the file at ``path``.

    * ``"workload"``: its top level has a function ``workload``: defined there, imported, or another one's second name.
      It is imported and called.
    * ``"module-level"``: its top level binds ``model`` and ``batch``, and nothing in the file runs a backward pass.
    * ``"script"``: anything else. It is run as ``__main__``.

    Raises:
        TargetError: the file cannot be read or parsed.
    """
    return _kind(parse(Path(path)))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file; every fault of its syntax is a :class:`TargetError` of two or three lines."""
    source = _read(path)
    if b"\0" in source:
        raise TargetError(f"{path} is not Python source: it contains null bytes.\n{_GIVE}")
    if source.lstrip().startswith(b"{") and b'"schema_version"' in source[:_HEAD_BYTES]:
        raise TargetError(f"{path} is a gradscope report, not Python source.\nTo show it: gradscope show {path}")
    with warnings.catch_warnings():
        # A doubtful escape is for the run itself to report, once.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source, filename=str(path))
            compile(tree, str(path), "exec", dont_inherit=True)  # finds what parsing does not: return outside function
        except SyntaxError as error:
            raise TargetError(_syntax_message(path, error, _line_of(source, error))) from None
    return tree


def compile_file(path: str | Path) -> CodeType:
    """The code of a file as ``python path`` compiles it: no ``__future__`` of ours, and its own encoding."""
    return compile(_read(path), str(path), "exec", dont_inherit=True)


def uses_relative_import(path: Path) -> bool:
    """Check that the file imports ``from .`` something, and so must be imported as part of its package."""
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(parse(path)))


_GIVE = "Give a model file or a training script, for instance: gradscope profile train.py"


_HEAD_BYTES = 200  # in which a RUN.json or FIX.json says what it is

_MOST_BYTES = 50_000_000  # of source; parsing needs a hundred times as much


def _read(path: str | Path) -> bytes:
    """The bytes of a regular file: it is read more than once, and a device may have no end."""
    try:
        return read_bytes(path, _MOST_BYTES)
    except UnreadableError as error:
        reason = os.strerror(errno.ENOENT) if error.missing else error
        raise TargetError(f"cannot read {shown_path(path)}: {reason}.\n{_GIVE}") from None


_SHOWN = 100  # characters of a line


def _syntax_message(path: Path, error: SyntaxError, line: str) -> str:
    where = f"{path}:{error.lineno}" if error.lineno else str(path)
    lines = [f"{where}: {error.msg}"]
    if line.strip():
        text = line.rstrip()
        stripped = text.lstrip()
        caret = min(max((error.offset or 1) - 1 - (len(text) - len(stripped)), 0), len(stripped))
        first = max(caret - _SHOWN // 2, 0) if len(stripped) > _SHOWN else 0
        lines.append(f"    {stripped[first : first + _SHOWN]}")
        if error.offset:
            lines.append("    " + " " * (caret - first) + "^")
    return "\n".join(lines)


def _line_of(source: bytes, error: SyntaxError) -> str:
    """The line that is at fault; of one of thousands of characters CPython itself keeps the end alone."""
    text = error.text or ""
    try:
        whole = importlib.util.decode_source(source).split("\n")[(error.lineno or 1) - 1]
    except (SyntaxError, UnicodeDecodeError, IndexError):
        return text
    return whole if text.strip() and whole.endswith(text.rstrip()) else text


def _kind(tree: ast.Module) -> Kind:
    top = list(_top_level(tree.body))
    if FACTORY in _functions(top):
        return "workload"
    if {"model", "batch"} <= _bound_names(top) and not _runs_backward(tree):
        return "module-level"
    return "script"


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the file is imported, into ``if``, ``try`` and ``with`` but not into a main guard."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            if not _is_main_guard(statement.test):
                yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        elif isinstance(statement, (ast.Try, ast.TryStar)):
            handlers = [line for handler in statement.handlers for line in handler.body]
            yield from _top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With):
            yield from _top_level(statement.body)


def _is_main_guard(test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    values = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    return "__name__" in names and "__main__" in values


def _functions(statements: Sequence[ast.stmt]) -> set[str]:
    """Functions defined, imported, or named anew; an import may bring anything, which the call will tell."""
    found = {s.name for s in statements if isinstance(s, ast.FunctionDef)} | _imported(statements)
    for statement in statements:
        if isinstance(statement, ast.Assign) and _is_function(statement.value, found):
            found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return found


def _is_function(value: ast.expr, functions: set[str]) -> bool:
    """Check that the expression can be seen to be a function: ``small``, a lambda, ``functools.partial(...)``."""
    if isinstance(value, ast.Name):
        return value.id in functions
    return isinstance(value, ast.Lambda) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) in {"partial", "functools.partial"}
    )


def _imported(statements: Sequence[ast.stmt]) -> set[str]:
    aliases = [alias for s in statements if isinstance(s, ast.ImportFrom) for alias in s.names]
    return {alias.asname or alias.name for alias in aliases}


def _bound_names(statements: Sequence[ast.stmt]) -> set[str]:
    targets: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets.append(statement.target)
    # Only plain names and unpacking bind: in `config.model = 1` and `sizes[batch] = 2` the names are read.
    nodes = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | _imported(statements)


def _runs_backward(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Call) and _is_backward(node.func) for node in ast.walk(tree))


def _is_backward(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "backward"
    if not isinstance(function, ast.Attribute):
        return False
    return function.attr == "backward" or ast.unparse(function).endswith("autograd.grad")
