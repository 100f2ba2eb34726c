"""Files of the same program that import a file: which of its names they take."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from gradscope.patching.edit.source import SourceFile, decoded

INSTALLED = frozenset({"site-packages", "dist-packages"})
_PYTHON = Path(ast.__file__).parent
_SKIPPED = frozenset({"__pycache__", "node_modules", "build", "dist", *INSTALLED})
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_MOST = 2000  # files and folders of a program; in a larger one nobody looks for what they take


def takes(file: SourceFile, name: str) -> bool:
    """Return whether another file of the program takes the global ``name`` from this one; True of a large one."""
    texts, word = _others(file), re.compile(rf"\b{re.escape(name)}\b|\*")
    if texts is None:
        return True
    trees = (list(ast.walk(_parsed(text))) for text in texts if word.search(text))
    return any(_take(nodes, name, _stem(file)) for nodes in trees)


def is_hidden_by(file: SourceFile, name: str) -> bool:
    """Return whether a file that imports all of this one reads a ``name`` of its own that a global would hide."""
    star, word = re.compile(rf"\b{re.escape(_stem(file))}\s+import\s*\(?\s*\*"), re.compile(rf"\b{re.escape(name)}\b")
    for text in _others(file) or []:
        if star.search(text) and word.search(text):
            nodes = list(ast.walk(_parsed(text)))
            whole = any(_is_import(node, _stem(file)) and _imported(node) == {"*"} for node in nodes)
            if whole and any(isinstance(node, ast.Name) and node.id == name for node in nodes):
                return True
    return False


def hides_gradscope(file: Path) -> Path | None:
    """Return a module of the program's, beside ``file`` or at its root, that is imported in place of this package."""
    own = Path(__file__).parents[2]
    for folder in dict.fromkeys((file.parent, _root(file))):
        for found in (folder / "gradscope.py", folder / "gradscope" / "__init__.py"):
            if found.exists() and found.resolve().parent != own.resolve():
                return found
    return None


def _take(nodes: list[ast.AST], name: str, stem: str) -> bool:
    runs = any(_names_file(node, stem) for node in nodes)
    holds = runs or any(_holds(node, stem) for node in nodes)
    part = any(isinstance(node, ast.Attribute) and node.attr == stem for node in nodes)  # of a package
    whole = re.compile(rf"{re.escape(name)}(\.\w+)*")
    spelled = re.compile(rf"\b{re.escape(stem)}\.{re.escape(name)}\b")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found = (holds or part) and node.attr == name
        elif isinstance(node, ast.Name):
            found = runs and node.id == name  # of exec
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr, mock.patch, annotations
            found = (holds and whole.fullmatch(node.value) is not None) or spelled.search(node.value) is not None
        else:
            found = _is_import(node, stem) and not _imported(node).isdisjoint({name, "*"})
        if found:
            return True
    return False


def _holds(node: ast.AST, stem: str) -> bool:
    """Return whether ``node`` names the module itself: an import, or a string that ``importlib`` may be given."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.rpartition(".")[2] == stem
    if isinstance(node, ast.Import):
        return any(alias.name.rpartition(".")[2] == stem for alias in node.names)
    return isinstance(node, ast.ImportFrom) and any(alias.name == stem for alias in node.names)


def _names_file(node: ast.AST, stem: str) -> bool:
    """Return whether ``node`` is a string that ends in the file's own name, as ``runpy`` and ``open`` are given."""
    return isinstance(node, ast.Constant) and str(node.value).replace("\\", "/").rpartition("/")[2] == f"{stem}.py"


def _is_import(node: ast.AST, stem: str) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == stem


def _imported(node: ast.AST) -> set[str]:
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


def _stem(file: SourceFile) -> str:
    path = Path(file.name)
    return path.parent.name if path.name == "__init__.py" else path.stem


def _others(file: SourceFile) -> list[str] | None:
    """Return the texts that name this file at all; None where there are too many to look."""
    if not file.others:
        below = _below(_project(Path(file.name)))
        paths = sorted({*_loaded(), *(below or [])} - {Path(file.name)})
        word = re.compile(rf"\b{re.escape(_stem(file))}\b")
        file.others.append(None if below is None else [text for text in map(_text, paths) if word.search(text)])
    return file.others[0]


def _loaded() -> Iterator[Path]:
    for module in list(sys.modules.values()):
        where = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(where, str) and where.endswith(".py"):
            path = Path(where)
            if INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(_PYTHON):
                yield path


def _root(path: Path) -> Path:
    """Return the folder of the program: the file's, or that of the package around it."""
    folder = path.parent
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _project(path: Path) -> Path:
    """Return the folder of all that is kept together with a file; its program's where nothing says so."""
    root = _root(path)
    above = (folder for folder in (root, *root.parents) if any((folder / name).exists() for name in _MARKS))
    return next(above, root)


def _below(root: Path) -> list[Path] | None:
    """Return the Python files and notebooks below ``root``, but environments and hidden ones; None of too many."""
    found: list[Path] = []
    for seen, (folder, folders, names) in enumerate(os.walk(root)):
        here = Path(folder)
        folders[:] = [each for each in folders if each not in _SKIPPED and not each.startswith(".")]
        folders[:] = [each for each in folders if not (here / each / "pyvenv.cfg").exists()]
        found += [here / name for name in names if name.endswith((".py", ".ipynb"))]
        if len(found) + seen > _MOST:
            return None
    return found


def _text(path: Path) -> str:
    """Return the text of a file, in whatever encoding; of a notebook its code."""
    try:
        text = decoded(path.read_bytes())[0]
        return _code_of(json.loads(text)) if path.suffix == ".ipynb" else text
    except (OSError, ValueError, TypeError, SyntaxError, RecursionError):
        return ""


def _code_of(notebook: Any) -> str:
    """Return the cells of code, one below the other, without what is no Python."""
    lines: list[str] = []
    for cell in notebook.get("cells", ()) if isinstance(notebook, dict) else ():
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            lines += "".join(cell.get("source", ())).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!", "?")))


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (ValueError, SyntaxError, RecursionError):
        return ast.Module(body=[], type_ignores=[])
