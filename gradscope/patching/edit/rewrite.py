"""From a match to an edit of the source: the checks, the bytes that change, and the old code behind a condition."""

from __future__ import annotations

import ast
import dataclasses
import keyword
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gradscope.patching.edit.aliases import check_aliases
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.dead_code import (
    Condition,
    DeadCode,
    check_asked_first,
    conditions_of_later_reads,
    dead_code,
    own_statements,
)
from gradscope.patching.edit.dtype_guards import guards_of_dtypes
from gradscope.patching.edit.expressions import shape_queries
from gradscope.patching.edit.guards import guards_of
from gradscope.patching.edit.imports import RecipeNames
from gradscope.patching.edit.later_changes import check_changed_later
from gradscope.patching.edit.new_call import NewCall, Pair, Second, pair_of, second_of
from gradscope.patching.edit.side_effects import check_calls, check_feeds_match, check_run
from gradscope.patching.edit.size_guards import guards_of_sizes
from gradscope.patching.edit.source import (
    FunctionSource,
    Refusal,
    Replacement,
    SourceFile,
    SourceGuard,
    edited,
    moved_by,
)
from gradscope.patching.edit.syntax import (
    is_name,
    names_in,
    reads_only,
    spelled_condition,
    statements_in,
    walked,
    within,
)
from gradscope.patching.match.match import Match
from gradscope.recording.graph import Frame, Recording


@dataclass(frozen=True)
class Edit:
    """What one match changes in one function."""

    source: FunctionSource
    recipe: str
    line: int  # of the expression that stays
    replacements: tuple[Replacement, ...]
    imports: tuple[tuple[str, str], ...]  # (function of gradscope.recipes, its name in this file)
    names: frozenset[str] = frozenset()  # new ones, bound in this function

    @property
    def key(self) -> tuple[object, ...]:
        """Return what is equal where the same is done to the same text."""
        return (self.source.file.name, self.recipe, self.replacements, self.imports)


def edit_of(
    match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str] = frozenset()
) -> Edit:
    """Return the edit of ``frame``'s function that replaces ``match``; of several ways, the first that is allowed.

    ``taken`` are names that other edits of the function bind.

    Raises:
        Refusal: the source does more than the match, or not only when the match does.
    """
    if match.reasons:
        raise Refusal("; ".join(match.reasons))
    ways = [match]
    if match.optional:
        wider = dataclasses.replace(match, nodes=match.nodes | match.optional, optional=frozenset())
        ways.insert(0, wider)
    for way in ways:
        try:
            return _edit(way, recording, frame, source, taken)
        except Refusal as refusal:
            reason = str(refusal)  # not the exception: its traceback holds this frame, and the user's above it
    for more in [giving for way in ways for giving in way.giving()]:
        with suppress(Refusal):
            return _edit(more, recording, frame, source, taken)
    if match.otherwise is not None:
        return edit_of(match.otherwise, recording, frame, source, taken)
    raise Refusal(reason)


def _edit(match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str]) -> Edit:
    """Return the edit that replaces all calls of ``match`` in one way."""
    if frame.suspends:
        raise Refusal("generators and coroutines are not edited")
    check_run(match, recording, frame, source)
    calls = CallSites(source, frame, recording.executed_in(frame), match.last)
    _check_result(match, calls)
    own = own_statements(match, calls)
    check_aliases(match, calls)
    check_changed_later(match, recording, calls)
    recipes = RecipeNames(source.file, frame.globals)
    call = NewCall(match, calls, own.parts, recipes, taken)
    spelled = {name for each in call.spelled for name in names_in(each)}
    pair = pair_of(match, calls, own.parts, spelled, taken | call.names)
    dead = dead_code(calls, own, spelled)
    check_feeds_match(match, calls, dead.parts)
    conditions = [*dead.conditions, *conditions_of_later_reads(dead, calls, None if pair is None else pair.name)]
    others = check_calls(match, calls, [each for each in dead.parts if each not in dead.unchanging], call.spelled)
    guards = [*others, *guards_of(match, recording, calls, recipes.name), *guards_of_sizes(match, calls)]
    guards += guards_of_dtypes(match, calls)
    guards += [each for each in dead.unchanging.values() if each.test]
    _check_guards(guards, dead, calls)
    second = second_of(match, recording, calls, conditional=bool(conditions))
    rewrite = Rewrite(match, calls, call, dead, tuple(conditions), tuple(guards), second, pair)
    made = replacements(rewrite)
    if rewrite.guarded:
        made = [with_fallback(rewrite, made)]
    names = frozenset(call.names if pair is None else {*call.names, pair.output})
    return Edit(source, match.recipe, calls.stays.lineno, tuple(made), recipes.imports, names)


def _check_result(match: Match, calls: CallSites) -> None:
    """Raise Refusal where the result is made in another function, or its expression runs another call."""
    last = match.last
    if last.places[0].frame is not calls.frame:
        raise Refusal(f"the result of {last.op} is computed in {last.places[0].frame.code.co_name}")
    own = {node.op for node in match.nodes}
    for node in calls.nodes:
        place = node.places[0]
        same = place.frame is calls.frame and calls.source.at(place.span) is calls.stays
        if same and node not in match.nodes and node.op not in own:
            raise Refusal(f"line {calls.stays.lineno}: the same call also runs {node.op}")


def _check_guards(guards: list[SourceGuard], dead: DeadCode, calls: CallSites) -> None:
    """Raise Refusal where something that the match relied on cannot be asked before the first removed statement."""
    for each in guards:
        if not reads_only(each.expression):
            text = calls.source.file.of(each.expression)
            raise Refusal(f"line {each.expression.lineno}: the value of {text} may change between calls")
    for each in guards:
        if within(calls.source.definition, each.expression):
            check_asked_first(each.expression, dead, calls)


# The replacements that an edit consists of: the result, the removed statements, and the lines left between them.


@dataclass(frozen=True)
class Rewrite:
    """What the edit of one match is made of.

    Attributes:
        conditions: the conditions that the match ran under, and the new code is for.
        guards: what the match relied on besides, as tests.
        second: the later call whose result the new call gives too.
        pair: the names of both tensors, where the new call gives one on the way to the result as well.
    """

    match: Match
    calls: CallSites
    call: NewCall
    dead: DeadCode
    conditions: tuple[Condition, ...]
    guards: tuple[SourceGuard, ...]
    second: Second | None
    pair: Pair | None

    @property
    def guarded(self) -> bool:
        """Return whether the old statements stay, for what the new ones are not for."""
        return bool(self.conditions or self.guards)

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
    found += [_result(rewrite)] if rewrite.pair is None else _result_and_beside(rewrite, rewrite.pair)
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


def _result_and_beside(rewrite: Rewrite, pair: Pair) -> list[Replacement]:
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
        raise Refusal(f"line {statement.lineno} contains several statements")
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
            raise Refusal(f"line {part.lineno}: a multi-line string cannot be re-indented")


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


# The old statements behind the new ones, under ``else``: without the conditions whose outcome is known there.


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
        raise Refusal(f"line {statement.lineno} contains several statements")
    new = edited(file.text[start:end], moved_by(start, made))
    conditions = rewrite.conditions
    tests = dict.fromkeys(spelled_condition(file.of(test), test, outcome) for test, outcome in conditions)
    decided = _decided(file, conditions, start, end) if len(tests) == 1 and not rewrite.guards else None
    old = edited(file.text[start:end], moved_by(start, decided.replacements) if decided else [])
    tests |= dict.fromkeys(each.test for each in rewrite.guards)
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
