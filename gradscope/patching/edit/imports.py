"""Imports: the line for the recipes, those that only the replaced code read, and files that import the edited one."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from gradscope.patching.edit.source import Definition, Replacement, SourceFile, decoded

PACKAGE = "gradscope.recipes"
_Import = ast.Import | ast.ImportFrom


class RecipeNames:
    """The names that ``file`` has for functions of gradscope.recipes, each chosen when it is first asked for.

    ``known`` are names that the file's globals hold.
    """

    def __init__(self, file: SourceFile, known: Container[str]) -> None:
        self.file, self.known = file, known
        self._names: dict[str, str] = {}

    def name(self, function: str) -> str:
        """Return the recipe's own name, or a longer one where this file, or one that imports all of it, uses that."""
        if function not in self._names:
            found = function
            while not _imported(self.file, function, found) and self._is_taken(found):
                found = f"gradscope_{found}"
            self._names[function] = found
        return self._names[function]

    def _is_taken(self, name: str) -> bool:
        return name in self.file.identifiers or name in self.known or is_hidden_by(self.file, name)

    @property
    def imports(self) -> tuple[tuple[str, str], ...]:
        """Return (function of gradscope.recipes, its name in the file), in the order they were asked for."""
        return tuple(self._names.items())


def import_of(file: SourceFile, names: list[tuple[str, str]]) -> Replacement | None:
    """Return the import of ``names``, (function, its name in this file); None where the file has them all.

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


def _imported(file: SourceFile, name: str, known: str) -> bool:
    """Return whether ``known`` is the recipe ``name`` in the whole file, and nothing else."""
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
    """Return whether ``node`` imports a module of the program that the file belongs to."""
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
    """Insert ``text`` below the statement that ``line`` belongs to; the line may be the last and without an end."""
    while any(node.lineno <= line < (node.end_lineno or 0) for node in file.tree.body) or _goes_on(file, line):
        line += 1
    start = file.line_starts[line + 1]
    newline = "" if start == 0 or file.text[start - 1 : start] == b"\n" else "\n"
    return Replacement(start, start, f"{newline}{text}")


def _goes_on(file: SourceFile, line: int) -> bool:
    """Return whether ``line`` ends with a backslash, outside of comments."""
    text = file.text[file.line_starts[line] : file.line_starts[line + 1]].rstrip(b"\n")
    return line > 0 and text.endswith(b"\\") and b"#" not in text


def _comments(file: SourceFile) -> int:
    """Count the lines of comments that the file begins with: a shebang, an encoding, a licence."""
    lines = file.text.decode().split("\n")
    return len(list(itertools.takewhile(lambda line: line.startswith("#"), lines)))


def unread_imports(file: SourceFile, text: str) -> list[Replacement]:
    """Return what removes the imports whose names ``file`` read before it became ``text``, and does not name any more.

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
        gone = [alias for alias in node.names if _bound_by(alias) in read and _is_unread(_bound_by(alias), own, text)]
        gone = [alias for alias in gone if not takes(file, _bound_by(alias))]
        if gone:
            found += _without(node, gone, file)
    return found


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _module(node: _Import) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def _is_unread(name: str, own: str, text: str) -> bool:
    """Return whether ``text`` holds ``name`` nowhere but in its import ``own``; as an attribute it is another's."""
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    return len(word.findall(text)) <= len(word.findall(own))


def _without(node: _Import, gone: list[ast.alias], file: SourceFile) -> list[Replacement]:
    """Remove the names ``gone`` from ``node``, where it is written so plainly that nothing else is lost."""
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
    """Return the offset past the empty line below, where one stands above as well, or nothing does."""
    above = file.text[:first].rsplit(b"\n", 2)[-2:-1]
    below = file.text[last:].partition(b"\n")
    return last + 1 if below[1] and not below[0].strip() and not b"".join(above).strip() else last


# Files of the same program that import a file: which of its names they take.


INSTALLED = frozenset({"site-packages", "dist-packages"})
_PYTHON = Path(ast.__file__).parent
# Thousands of modules are loaded: a path of each would take longer than all else.
_NOT_THE_PROGRAMS = re.compile(rf"^{re.escape(str(_PYTHON))}[/\\]|(^|[/\\])({'|'.join(INSTALLED)})[/\\]")
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
            whole = any(_is_import(node, _stem(file)) and _names_taken(node) == {"*"} for node in nodes)
            if whole and any(isinstance(node, ast.Name) and node.id == name for node in nodes):
                return True
    return False


def hides_gradscope(file: Path) -> Path | None:
    """Return a module of the program's, beside ``file`` or at its root, that is imported in place of this package."""
    own = Path(__file__).parents[2]
    for folder in dict.fromkeys((file.parent, _root_of_program(file))):
        for found in (folder / "gradscope.py", folder / "gradscope" / "__init__.py"):
            if found.exists() and found.resolve().parent != own.resolve():
                return found
    return None


def _take(nodes: list[ast.AST], name: str, stem: str) -> bool:
    runs = any(_names_file(node, stem) for node in nodes)
    holds = runs or any(_names_module(node, stem) for node in nodes)
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
            found = _is_import(node, stem) and not _names_taken(node).isdisjoint({name, "*"})
        if found:
            return True
    return False


def _names_module(node: ast.AST, stem: str) -> bool:
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


def _names_taken(node: ast.AST) -> set[str]:
    return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()


def _stem(file: SourceFile) -> str:
    path = Path(file.name)
    return path.parent.name if path.name == "__init__.py" else path.stem


def _others(file: SourceFile) -> list[str] | None:
    """Return the texts that name this file at all; None where there are too many to look."""
    if not file.others:
        below = _below(_project(Path(file.name)))
        paths = sorted({*_loaded(), *(below or [])} - {Path(file.name)})
        stem = _stem(file)
        word = re.compile(rf"\b{re.escape(stem)}\b")  # many times slower to look for than the text alone
        named = [text for text in map(_text, paths) if stem in text and word.search(text)]
        file.others.append(None if below is None else named)
    return file.others[0]


def _loaded() -> Iterator[Path]:
    for module in list(sys.modules.values()):
        where = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(where, str) and where.endswith(".py") and not _NOT_THE_PROGRAMS.search(where):
            yield Path(where)


def _root_of_program(path: Path) -> Path:
    """Return the folder of the program: the file's, or that of the package around it."""
    folder = path.parent
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _project(path: Path) -> Path:
    """Return the folder of all that is kept together with a file; its program's where nothing says so."""
    root = _root_of_program(path)
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
