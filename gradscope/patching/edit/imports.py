"""The line that imports the recipes, where the file's author would have put it."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

from gradscope.patching.edit.importers import INSTALLED
from gradscope.patching.edit.replacement import Replacement
from gradscope.patching.edit.source import Definition, SourceFile

PACKAGE = "gradscope.recipes"
_Import = ast.Import | ast.ImportFrom


def import_of(file: SourceFile, names: list[tuple[str, str]]) -> Replacement | None:
    """The import of ``names``, (function, the name it has in this file); None where the file has them all.

    It stands with the packages that others wrote, behind the last of them or, where they are sorted, in its place; not
    among the program's own modules. Without any import it stands behind the docstring, or the file's first comments.
    """
    held = next((node for node in file.tree.body if isinstance(node, ast.ImportFrom) and node.module == PACKAGE), None)
    if held is not None and not any(each.name == "*" for each in held.names):
        known = {(each.name, each.asname or each.name) for each in held.names}
        if known >= set(names):
            return None
        return Replacement(file.start(held), file.end(held), _line(file, sorted(known | set(names))).rstrip("\n"))
    text = _line(file, names)
    above = list(itertools.takewhile(lambda node: not isinstance(node, (Definition, ast.ClassDef)), file.tree.body))
    imports = [node for node in above if isinstance(node, _Import)]
    others = [node for node in imports if not _is_own(node, file)]
    if others:
        return _among(file, others, text)
    if imports and file.line_starts[imports[0].lineno] == file.start(imports[0]):
        start = file.start(imports[0])
        return Replacement(start, start, f"{text}\n")
    if ast.get_docstring(file.tree, clean=False) is not None:
        return _behind(file, above[0].end_lineno or 1, f"\n{text}")
    comments = _comments(file)
    return _behind(file, comments, f"\n{text}" if comments else f"{text}\n")


def imported(file: SourceFile, name: str, known: str) -> bool:
    """Whether ``known`` is the recipe ``name`` in the whole file, and nothing else."""
    homes = [
        alias
        for node in file.tree.body
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE
        for alias in node.names
        if alias.name == name and (alias.asname or alias.name) == known
    ]
    return bool(homes) and file.bound[known] == len(homes)


def _line(file: SourceFile, names: list[tuple[str, str]]) -> str:
    pairs = [name if name == known else f"{name} as {known}" for name, known in names]
    text = f"from {PACKAGE} import {', '.join(pairs)}\n"
    if len(text) - 1 <= file.style.width:
        return text
    blocks = (node.body[0] for node in file.tree.body if isinstance(node, (Definition, ast.ClassDef)))
    step = next(filter(None, map(file.indent, blocks)), "    ")
    return f"from {PACKAGE} import (\n" + "".join(f"{step}{pair},\n" for pair in pairs) + ")\n"


def _among(file: SourceFile, others: list[_Import], text: str) -> Replacement:
    foreign = [node for node in others if _root(node) not in _OF_PYTHON]
    if not foreign:
        return _behind(file, others[-1].end_lineno or 0, f"\n{text}")
    group = [foreign[-1]]
    for node in reversed(others[: others.index(foreign[-1])]):
        if (node.end_lineno or 0) + 1 != group[0].lineno:
            break
        group.insert(0, node)
    parts = [node for node in group if isinstance(node, ast.ImportFrom)]
    modules = [(node.module or "").lower() for node in parts]
    if len(parts) > 1 and modules == sorted(modules) and group[-len(parts) :] == parts:
        later = next((node for node, module in zip(parts, modules, strict=True) if module > PACKAGE), None)
        if later is not None:
            return _behind(file, later.lineno - 1, text)
    return _behind(file, foreign[-1].end_lineno or 0, text)


_OF_PYTHON = frozenset({*sys.stdlib_module_names, "__future__"})


def _root(node: _Import) -> str:
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    return name.partition(".")[0]


def _is_own(node: _Import, file: SourceFile) -> bool:
    """Whether it imports a module of the program that the file belongs to."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return True
    root, folder = _root(node), Path(file.name).parent
    where = getattr(sys.modules.get(root), "__file__", None) or ""
    if root in _OF_PYTHON or any(part in INSTALLED for part in Path(where).parts):
        return False
    if root in folder.parts[-3:] or _holds(folder, root):
        return True
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder.name not in INSTALLED and _holds(folder, root)


def _holds(folder: Path, root: str) -> bool:
    return (folder / f"{root}.py").exists() or (folder / root / "__init__.py").exists()


def _behind(file: SourceFile, line: int, text: str) -> Replacement:
    """``text`` below a line, which may be the last and without an end; and below all that goes on from there."""
    while any(node.lineno <= line < (node.end_lineno or 0) for node in file.tree.body) or _goes_on(file, line):
        line += 1
    start = file.line_starts[line + 1]
    newline = "" if start == 0 or file.text[start - 1 : start] == b"\n" else "\n"
    return Replacement(start, start, f"{newline}{text}")


def _goes_on(file: SourceFile, line: int) -> bool:
    """Whether a line ends with a backslash, outside of comments."""
    text = file.text[file.line_starts[line] : file.line_starts[line + 1]].rstrip(b"\n")
    return line > 0 and text.endswith(b"\\") and b"#" not in text


def _comments(file: SourceFile) -> int:
    """How many lines of comments the file begins with: a shebang, an encoding, a licence."""
    lines = file.text.decode().split("\n")
    return len(list(itertools.takewhile(lambda line: line.startswith("#"), lines)))
