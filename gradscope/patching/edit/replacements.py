"""The replacements that an edit consists of: the result, the removed statements, and the lines left between them."""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.dead_code import Condition, DeadCode
from gradscope.patching.edit.new_call import NewCall
from gradscope.patching.edit.replacement import Known, Refusal, Replacement, edited, moved_by
from gradscope.patching.edit.shape_queries import shape_queries
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.edit.syntax import statements_in, walked
from gradscope.patching.edit.two_results import Pair, Second
from gradscope.patching.match import Match


@dataclass(frozen=True)
class Rewrite:
    """What the edit of one match is made of.

    Attributes:
        conditions: the conditions that the match ran under, and the new code is for.
        known: what the match relied on besides, as tests.
        second: the later call whose result the new call gives too.
        pair: the names of both tensors, where the new call gives one on the way to the result as well.
    """

    match: Match
    calls: CallSites
    call: NewCall
    dead: DeadCode
    conditions: tuple[Condition, ...]
    known: tuple[Known, ...]
    second: Second | None
    pair: Pair | None

    @property
    def guarded(self) -> bool:
        """Return whether the old statements stay, for what the new ones are not for."""
        return bool(self.conditions or self.known)

    @property
    def file(self) -> SourceFile:
        """The file that is edited."""
        return self.calls.source.file


def replacements(rewrite: Rewrite) -> list[Replacement]:
    """Return what changes in the text, without the conditions."""
    file, dead = rewrite.file, rewrite.dead
    asked = {
        statement: [
            _replaced(old, new, file) for old, new in shape_queries(statement, dead.bound, rewrite.match, rewrite.calls)
        ]
        for statement in dead.changed
    }
    found = [_removal(statement, asked, rewrite) for statement in dead.gone]
    found += [part for statement, parts in asked.items() if statement not in dead.kept for part in parts]
    found += [_result(rewrite)] if rewrite.pair is None else _both(rewrite, rewrite.pair)
    if rewrite.second is not None:
        name, target = rewrite.second.name, rewrite.second.target
        found += [_replaced(target, f"{name}, {target.id}", file), _replaced(rewrite.second.expression, name, file)]
    found.sort(key=lambda part: part.start)
    return found + _blank_lines(found, rewrite)


def _replaced(node: ast.AST, text: str, file: SourceFile) -> Replacement:
    return Replacement(file.start(node), file.end(node), text)


def _result(rewrite: Rewrite) -> Replacement:
    """Return the new call in the place of the match's last expression."""
    file, call, stays = rewrite.file, rewrite.call, rewrite.calls.stays
    if call.hoisted.get(rewrite.calls.statement):
        raise Refusal(f"line {rewrite.calls.statement.lineno} evaluates an operand that cannot be moved")
    text = call.text(guarded=rewrite.guarded)
    if isinstance(stays, ast.AugAssign):
        text = f"{file.of(stays.target)} = {text}"
    start, end, same = file.start(stays), file.end(stays), call.unchanged
    # What is only repeated is left out, so that another pattern in it can be replaced too.
    if same and text.endswith(same) and file.text[start:end].endswith(same.encode()):
        text, end = text.removesuffix(same), end - len(same.encode())
    elif isinstance(stays, ast.BinOp):
        start, end = _with_brackets(start, end, file.text)
    return Replacement(start, end, text)


def _both(rewrite: Rewrite, pair: Pair) -> list[Replacement]:
    """Return the new call that gives two tensors, as the assignment to both names that it needs."""
    file, stays, own = rewrite.file, rewrite.calls.stays, rewrite.calls.statement
    if rewrite.call.hoisted.get(own):
        raise Refusal(f"line {own.lineno} evaluates an operand that cannot be moved")
    names = f"{pair.output}, {pair.name}"
    text = rewrite.call.text(guarded=rewrite.guarded, assigned=f"{names} = ", last=pair.dtype)
    if pair.target is not None:
        return [_replaced(pair.target, names, file), _replaced(stays, text, file)]
    start, end = file.start(stays), file.end(stays)
    if isinstance(stays, ast.BinOp):
        start, end = _with_brackets(start, end, file.text)
    above = Replacement(file.start(own), file.start(own), f"{names} = {text}\n{file.indent(own)}")
    return [above, Replacement(start, end, pair.read)]


def _with_brackets(start: int, end: int, source: bytes) -> tuple[int, int]:
    """Return the range of an operator with the brackets around it, which a call in its place needs no more."""
    before, after = source[:start].rstrip(), source[end:].lstrip()
    if not before.endswith(b"(") or not after.startswith(b")"):
        return start, end
    above = before[:-1].rstrip()
    word = re.search(rb"\w+$", above)
    called = word is not None and (above == before[:-1] or not keyword.iskeyword(word[0].decode()))
    if called or above.endswith((b")", b"]", b"'", b'"')):
        return start, end
    return len(before) - 1, len(source) - len(after) + 1


def _removal(statement: ast.stmt, asked: dict[ast.stmt, list[Replacement]], rewrite: Rewrite) -> Replacement:
    """Remove the lines of ``statement``, but for what stays of it."""
    file, indent = rewrite.file, rewrite.file.indent(statement)
    start, end = file.start(statement), file.end(statement)
    lines: list[str] = []
    for part in sorted(statements_in([statement]), key=file.start):
        lines += rewrite.call.hoisted.get(part, [])
        if part in rewrite.dead.kept:
            lines.append(_unnested(part, asked.get(part, []), statement.col_offset, file))
    if lines:
        return Replacement(start, end, f"\n{indent}".join(lines))
    line_start, line_end = file.line_starts[statement.lineno], file.line_starts[(statement.end_lineno or 0) + 1]
    rest = file.text[end:line_end].strip()
    if file.text[line_start:start].strip() or (rest and not rest.startswith(b"#")):
        raise Refusal(f"line {statement.lineno} holds several statements")
    return Replacement(line_start, line_end, "")


def _unnested(statement: ast.stmt, parts: list[Replacement], indent: int, file: SourceFile) -> str:
    """Return the text of a statement inside a condition, to stand where the condition stood."""
    check_can_be_indented(statement)
    start = file.start(statement)
    new = edited(file.text[start : file.end(statement)], moved_by(start, parts)).decode()
    first, *rest = new.split("\n")
    less = statement.col_offset - indent
    return "\n".join([first, *(line[min(less, len(line) - len(line.lstrip())) :] for line in rest)])


def check_can_be_indented(statement: ast.stmt) -> None:
    """Raise Refusal where ``statement`` holds a string of several lines, which another indent would change."""
    for part in walked(statement):
        if isinstance(part, (ast.Constant, ast.JoinedStr)) and part.lineno != part.end_lineno:
            raise Refusal(f"line {part.lineno}: a text of several lines cannot be indented")


def _blank_lines(found: list[Replacement], rewrite: Rewrite) -> list[Replacement]:
    """Remove the empty lines and comments that belong to removed statements which leave nothing behind."""
    file, dead = rewrite.file, rewrite.dead
    left = {part.start for part in found if not part.text}
    gone = {each for each in dead.gone if file.line_starts[each.lineno] in left}
    if not gone:
        return []
    block = rewrite.calls.block
    at = min(map(block.index, dead.gone))
    above = (block[at - 1].end_lineno or 0) if at else _last_code_above(block[0], file)
    first = block[at].lineno if rewrite.guarded else above + 1
    lines = range(first, rewrite.calls.statement.lineno)
    return blank_lines(file, lines, block, gone, opens=rewrite.guarded or not at)


def _last_code_above(first: ast.stmt, file: SourceFile) -> int:
    """Return the last line above a block's first statement that is code."""
    for line in range(first.lineno - 1, 0, -1):
        text = file.text[file.line_starts[line] : file.line_starts[line + 1]].strip()
        if text and not text.startswith(b"#"):
            return line
    return 0


_GOES, _STAYS, _EMPTY, _COMMENT, _HEADING = "goes", "stays", "empty", "comment", "comment of what goes"


def blank_lines(
    file: SourceFile, lines: range, block: list[ast.stmt], gone: set[ast.stmt], opens: bool
) -> list[Replacement]:
    """Remove those of ``lines``, above a result, that belong to the removed statements ``gone`` of its block.

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
    """Mark the comments below which all is removed; the last ones stand above the result, which stays."""
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
    """Return the empty lines of a run of removed lines that are removed too."""
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
