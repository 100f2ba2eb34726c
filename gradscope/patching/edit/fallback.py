"""The old statements behind the new ones, under ``else``: without the conditions whose outcome is known there."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from gradscope.patching.edit.dead_code import Condition
from gradscope.patching.edit.replacement import Refusal, Replacement, edited, moved_by
from gradscope.patching.edit.replacements import Rewrite, check_can_be_indented
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.edit.syntax import is_name, spelled_condition


def with_fallback(rewrite: Rewrite, made: list[Replacement]) -> Replacement:
    """Return the new statements under the conditions that they are for, with the old ones under ``else``."""
    file, statement = rewrite.file, rewrite.calls.statement
    start = file.line_starts[min((each.lineno for each in rewrite.dead.gone), default=statement.lineno)]
    end = file.line_starts[(statement.end_lineno or 0) + 1]
    for each in rewrite.calls.block:
        if start <= file.start(each) < end:
            check_can_be_indented(each)
    shared = file.text[file.end(statement) : end].strip().startswith(b";")
    if shared or (file.text[start : file.start(statement)].strip() and not rewrite.dead.gone):
        raise Refusal(f"line {statement.lineno} holds several statements")
    new = edited(file.text[start:end], moved_by(start, made))
    conditions = rewrite.conditions
    tests = dict.fromkeys(spelled_condition(file.of(test), test, outcome) for test, outcome in conditions)
    decided = _decided(file, conditions, start, end) if len(tests) == 1 and not rewrite.known else None
    old = edited(file.text[start:end], moved_by(start, decided.replacements) if decided else [])
    tests |= dict.fromkeys(each.text for each in rewrite.known)
    indent, step = file.indent(statement), file.step(statement)
    sides = [(" and ".join(tests), new), ("", old)]
    if decided and decided.first:
        test, outcome = conditions[0]
        sides = [(spelled_condition(file.of(test), test, not outcome), old), ("", new)]
    lines = []
    for condition, text in sides:
        head = f"{indent}if {condition}:" if condition else f"{indent}else:"
        fits = not condition or len(tests) == 1 or len(head) <= file.style.width
        apart = [f"{indent}{step}{'and ' if place else ''}{test}" for place, test in enumerate(tests)]
        lines += [head] if fits else [f"{indent}if (", *apart, f"{indent}):"]
        lines += _indented(text, step)
    return Replacement(start, end, "\n".join(lines) + "\n")


def _indented(text: bytes, step: str) -> list[str]:
    return [f"{step}{line}" if line.strip() else line for line in text.decode().strip("\n").split("\n")]


@dataclass(frozen=True)
class _Decided:
    """The old text without the conditions that are decided.

    Attributes:
        replacements: each decided condition by the side that runs.
        first: whether it stood first in the source: above the side that the new code is for.
    """

    replacements: list[Replacement]
    first: bool


def _decided(file: SourceFile, tests: Sequence[Condition], start: int, end: int) -> _Decided | None:
    """Return the old text, from ``start`` to ``end``, where one condition has the other outcome.

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
    return None if inside else _Decided(found, first)


def _branch(file: SourceFile, branch: ast.If, side: list[ast.stmt]) -> Replacement | None:
    """Replace an ``if`` by the statements of one side."""
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
    """Return the line that ``if ...:`` ends on."""
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
    """Replace ``x = f(x) if a else x`` by ``x = f(x)``, or by nothing."""
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
