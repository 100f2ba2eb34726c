"""Imports that a file needed for what was replaced, and for nothing else: they go with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gradscope.patching.edit.importers import takes
from gradscope.patching.edit.replacement import Replacement
from gradscope.patching.edit.source import SourceFile

_Import = ast.Import | ast.ImportFrom


def unread_imports(file: SourceFile, text: str) -> list[Replacement]:
    """What takes away the imports whose names ``file`` read before it became ``text``, and does not name any more.

    A name in a comment or a string of ``text`` counts as one. Kept are those of a package's ``__init__``, under a
    condition, beside a comment or another statement on their line, and what another file of the program takes from this
    one.
    """
    if Path(file.name).name == "__init__.py":
        return []
    read = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    found: list[Replacement] = []
    for node in file.tree.body:
        if not isinstance(node, _Import) or _module(node) in {"__future__", "gradscope.recipes"}:
            continue
        own = file.of(node)
        gone = [alias for alias in node.names if _name(alias) in read and _is_unread(_name(alias), own, text)]
        gone = [alias for alias in gone if not takes(file, _name(alias))]
        if gone:
            found += _without(node, gone, file)
    return found


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _module(node: _Import) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def _is_unread(name: str, own: str, text: str) -> bool:
    """Whether it stands nowhere but in its import, as a name or a word; as an attribute it is another's."""
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    return len(word.findall(text)) <= len(word.findall(own))


def _without(node: _Import, gone: list[ast.alias], file: SourceFile) -> list[Replacement]:
    """``node`` without some of its names, where it is written so plainly that nothing else is lost."""
    first, last = file.line_starts[node.lineno], file.line_starts[(node.end_lineno or node.lineno) + 1]
    whole = file.text[first:last].decode()
    if whole.strip() != file.of(node):
        return []
    if len(gone) == len(node.names):
        return [Replacement(first, _over_blank(first, last, file), "")]
    if node.lineno == node.end_lineno:
        left = [ast.unparse(alias) for alias in node.names if alias not in gone]
        head = re.match(r"\s*(from\s+\S+\s+)?import\s+", whole)
        if head is None or "(" in whole:
            return []
        return [Replacement(first, last, f"{head.group()}{', '.join(left)}\n")]
    if "(" not in whole:  # lines that a backslash joins
        return []
    made = []
    for alias in gone:
        start, end = file.line_starts[alias.lineno], file.line_starts[alias.lineno + 1]
        if file.text[start:end].decode().strip().rstrip(",").rstrip() != ast.unparse(alias):
            return []
        made.append(Replacement(start, end, ""))
    return made


def _over_blank(first: int, last: int, file: SourceFile) -> int:
    """Past the empty line below, where one stands above as well, or nothing does."""
    above = file.text[:first].rsplit(b"\n", 2)[-2:-1]
    below = file.text[last:].partition(b"\n")
    return last + 1 if below[1] and not below[0].strip() and not b"".join(above).strip() else last
