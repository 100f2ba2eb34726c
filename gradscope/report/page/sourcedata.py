"""The functions that measured lines stand in, as the page shows them: whole, with what each line takes.

RUN.json holds the measured lines alone. The rest is read from the files when the page is written, and left out where a
file is not there any more, or a measured line is not what it was: a function that changed is not what was measured.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.tables import LineRow

MOST_FUNCTIONS, MOST_LINES = 40, 200
_MOST_BYTES = 4_000_000  # of a file; a longer one is no module that somebody wrote
_AROUND = 3  # lines shown before and behind those that stand in no function


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    first: int
    last: int


def source_record(rows: Sequence[LineRow]) -> list[dict[str, Any]]:
    """Return the functions that take most time, first: file, name, number of the first line, and the lines.

    Lines are without what all of them are indented by.
    """
    by_file: defaultdict[str, list[LineRow]] = defaultdict(list)
    for row in rows:
        if row.text:
            by_file[row.file].append(row)
    found = [each for file, held in by_file.items() for each in _in_file(file, held)]
    found.sort(key=lambda each: -each[0])
    return [record for _, record in found[:MOST_FUNCTIONS]]


def _in_file(file: str, rows: Sequence[LineRow]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each function of a file with measured lines, and what these take."""
    try:
        path = Path(file)
        if path.stat().st_size > _MOST_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    # As Python counts them: a form feed or U+2028 ends no line.
    lines = [line.rstrip("\r") for line in text.split("\n")]
    functions = list(_functions(tree, ""))
    held: defaultdict[_Function | None, list[LineRow]] = defaultdict(list)
    for row in rows:
        inside = [each for each in functions if each.first <= row.line <= each.last]
        held[max(inside, key=lambda each: each.first, default=None)].append(row)
    for function, measured in held.items():
        if any(not _is_as_it_was(row, lines) for row in measured):
            continue
        first, last = _shown(function, [row.line for row in measured], len(lines))
        yield (
            sum(row.forward_ns + row.backward_ns for row in measured),
            {
                "file": file,
                "function": "" if function is None else function.name,
                "first": first,
                "lines": textwrap.dedent("\n".join(lines[first - 1 : last])).split("\n"),
            },
        )


def _functions(tree: ast.AST, above: str) -> Iterator[_Function]:
    """Yield every function below a node, by its qualified name without ``<locals>``."""
    for node in ast.iter_child_nodes(tree):
        name = above
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{above}.{node.name}" if above else node.name
            if not isinstance(node, ast.ClassDef):
                yield _Function(name, node.lineno, node.end_lineno or node.lineno)
        yield from _functions(node, name)


def _is_as_it_was(row: LineRow, lines: Sequence[str]) -> bool:
    return row.line <= len(lines) and lines[row.line - 1].strip().startswith(row.text.strip().removesuffix("…"))


def _shown(function: _Function | None, measured: Sequence[int], count: int) -> tuple[int, int]:
    """The first and the last line that are shown: of a long function those around the measured ones."""
    low, high = min(measured) - _AROUND, max(measured) + _AROUND
    if function is not None and function.last - function.first < MOST_LINES:
        low, high = function.first, function.last
    elif function is not None:
        low, high = max(low, function.first), min(high, function.last)
    low = max(low, 1)
    return low, min(high, low + MOST_LINES - 1, count)
