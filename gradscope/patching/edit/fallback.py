"""The old statements for what the new code is not for, without the questions whose answer is known there."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradscope.patching.edit.replacement import Replacement
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.edit.syntax import is_name


@dataclass(frozen=True)
class Otherwise:
    """What the old text becomes.

    Attributes:
        replacements: the conditions that are decided, each by the side that runs.
        first: whether it stood first in the source: above the side that the new code is for.
    """

    replacements: list[Replacement]
    first: bool


def otherwise(file: SourceFile, tests: list[tuple[ast.expr, bool]], start: int, end: int) -> Otherwise | None:
    """The old text, from ``start`` to ``end``, where one condition had the other outcome.

    ``tests`` are all places that ask it. None where one cannot be taken out of the text.
    """
    found, first = [], False
    for test, outcome in tests:
        above = file.parents[test]
        if not start <= file.start(test) < end:
            continue
        if isinstance(above, ast.If) and above.test is test:
            side = above.orelse if outcome else above.body
            first = first or (not outcome and bool(above.orelse))
            replaced = _branch(file, above, side)
        elif isinstance(above, ast.IfExp) and above.test is test:
            replaced = _chosen(file, above, above.orelse if outcome else above.body)
        else:
            return None
        if replaced is None:
            return None
        found.append(replaced)
    inside = any(one is not other and one.start <= other.start < one.end for one in found for other in found)
    return None if inside else Otherwise(found, first)


def _branch(file: SourceFile, branch: ast.If, side: list[ast.stmt]) -> Replacement | None:
    """The statements of one side in the place of an ``if``."""
    start, end = file.line_starts[branch.lineno], file.line_starts[(branch.end_lineno or 0) + 1]
    inside = branch.body + branch.orelse
    if file.text[start : file.start(branch)].strip() or any(each.lineno == branch.lineno for each in inside):
        return None
    if file.text[file.start(branch) :].startswith(b"elif"):
        return None
    if not side:
        return Replacement(start, end, "")
    if side is branch.orelse and file.text[file.start(side[0]) :].startswith(b"elif"):
        return Replacement(start, file.start(side[0]) + 2, file.indent(branch))  # "el" goes
    head = _end_of_head(file, branch) if side is branch.body else _end_of_else(file, branch)
    if head is None:
        return None
    below = _end_of_else(file, branch) if side is branch.body and branch.orelse else None  # comments may end a side
    last = below or (side[-1].end_lineno or 0) + 1
    lines = file.text[file.line_starts[head + 1] : file.line_starts[last]].decode().split("\n")
    less = len(file.indent(side[0])) - len(file.indent(branch))
    text = "\n".join(line[min(less, len(line) - len(line.lstrip())) :] for line in lines)
    return Replacement(start, end, text)


def _end_of_head(file: SourceFile, branch: ast.If) -> int | None:
    """The line that ``if ...:`` ends on."""
    end = file.end(branch.test)
    colon = file.text.find(b":", end)
    if colon < 0 or file.text[end:colon].strip(b" )\n\t"):
        return None
    return file.text.count(b"\n", 0, colon) + 1


def _end_of_else(file: SourceFile, branch: ast.If) -> int | None:
    for line in range((branch.body[-1].end_lineno or 0) + 1, branch.orelse[0].lineno):
        text = file.text[file.line_starts[line] : file.line_starts[line + 1]].partition(b"#")[0]
        if text.replace(b" ", b"").strip() == b"else:":
            return line
    return None


def _chosen(file: SourceFile, choice: ast.IfExp, side: ast.expr) -> Replacement | None:
    """``x = f(x) if a else x`` as ``x = f(x)``, or as nothing."""
    home = file.parents[choice]
    if not isinstance(home, ast.Assign) or home.value is not choice or len(home.targets) != 1:
        return None
    target = home.targets[0]
    if isinstance(target, ast.Name) and is_name(side, target.id):
        start, end = file.line_starts[home.lineno], file.line_starts[(home.end_lineno or 0) + 1]
        alone = not file.text[start : file.start(home)].strip() and not _code(file.text[file.end(home) : end])
        return Replacement(start, end, "") if alone else None
    if side.lineno != side.end_lineno or home.lineno != home.end_lineno:
        return None
    return Replacement(file.end(target), file.end(home), f" = {file.of(side)}")


def _code(text: bytes) -> bytes:
    return text.partition(b"#")[0].strip()
