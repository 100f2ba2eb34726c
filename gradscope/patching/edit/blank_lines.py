"""Empty lines and comments that stood between statements which go: what is left of them reads as if written so."""

from __future__ import annotations

import ast

from gradscope.patching.edit.replacement import Replacement
from gradscope.patching.edit.source import SourceFile

_GOES, _STAYS, _EMPTY, _COMMENT, _HEADING = "goes", "stays", "empty", "comment", "comment of what goes"


def gaps(file: SourceFile, lines: range, block: list[ast.stmt], gone: set[ast.stmt], opens: bool) -> list[Replacement]:
    """Of the ``lines`` above a result, those that go with the statements ``gone`` of its block, beside theirs.

    A comment goes with the statements below it, up to the next comment, if they all go. Of the empty lines around what
    goes those on one side stay. ``opens``: a block begins with these lines.
    """
    kinds = _kinds(file, lines, block, gone)
    _mark_headings(kinds)
    deleted: list[int] = []
    run: list[int] = []
    before: str | None = None if opens else _STAYS
    for line in [*sorted(kinds), None]:
        if line is not None and kinds[line] in {_GOES, _HEADING, _EMPTY}:
            run.append(line)
            continue
        deleted += _superfluous(run, kinds, before)
        run, before = [], kinds[line] if line is not None else None
    deleted += [line for line, kind in kinds.items() if kind == _HEADING]
    return [Replacement(file.line_starts[line], file.line_starts[line + 1], "", True) for line in sorted(deleted)]


def _kinds(file: SourceFile, lines: range, block: list[ast.stmt], gone: set[ast.stmt]) -> dict[int, str]:
    found = {}
    for line in lines:
        text = file.text[file.line_starts[line] : file.line_starts[line + 1]].strip()
        found[line] = _EMPTY if not text else _COMMENT
    for statement in block:
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
            if line in found:
                found[line] = _GOES if statement in gone else _STAYS
    return found


def _mark_headings(kinds: dict[int, str]) -> None:
    """Tell the comments below which all goes; the last ones stand above the result, which stays."""
    heading: list[int] = []
    below: set[str] = set()
    for line in sorted(kinds):
        kind = kinds[line]
        if kind != _COMMENT:
            below.add(kind)
            continue
        if _GOES in below or _STAYS in below:
            if _STAYS not in below:
                kinds.update(dict.fromkeys(heading, _HEADING))
            heading, below = [], set()
        heading.append(line)


def _superfluous(run: list[int], kinds: dict[int, str], before: str | None) -> list[int]:
    """The empty lines of a run of what goes that go too."""
    parts = [line for line in run if kinds[line] != _EMPTY]
    if not parts:
        return []
    leading = [line for line in run if line < parts[0]]
    trailing = [line for line in run if line > parts[-1]]
    middle = [line for line in run if parts[0] < line < parts[-1] and kinds[line] == _EMPTY]
    if before is None:
        return [*leading, *middle, *trailing]
    more = len(trailing) > len(leading) and before == _STAYS
    return [*middle, *(leading if more else trailing)]
