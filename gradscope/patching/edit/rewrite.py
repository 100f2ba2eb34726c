"""From a match to an edit of the source: which statements go, what is written instead, and whether that is allowed."""

from __future__ import annotations

import ast
import dataclasses
import keyword
import re
from dataclasses import dataclass

from gradscope.patching.edit.blank_lines import gaps
from gradscope.patching.edit.call_sites import Texts
from gradscope.patching.edit.dead_code import Statements
from gradscope.patching.edit.escapes import check_run
from gradscope.patching.edit.fallback import otherwise
from gradscope.patching.edit.liveness import Names
from gradscope.patching.edit.new_call import Spelling
from gradscope.patching.edit.refusal import Refusal
from gradscope.patching.edit.replacement import Replacement, edited
from gradscope.patching.edit.second_result import second_of
from gradscope.patching.edit.shape_queries import Forms
from gradscope.patching.edit.side_effects import check_calls
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import bound_names, names_in, spelled_condition, statements_in, walked
from gradscope.patching.lengths import known_sizes
from gradscope.patching.match import Match
from gradscope.patching.relied import relied_on
from gradscope.recording.graph import Frame, Recording


@dataclass(frozen=True)
class Edit:
    """What one match changes in one function."""

    source: FunctionSource
    recipe: str
    line: int  # of the expression that stays
    replacements: tuple[Replacement, ...]
    imports: tuple[tuple[str, str], ...]  # (function of gradscope.recipes, the name it has in this file)
    names: frozenset[str] = frozenset()  # new ones, bound in this function

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the same is done to the same text."""
        return (self.source.file.name, self.recipe, self.replacements, self.imports)


def edit_of(
    match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str] = frozenset()
) -> Edit:
    """The edit of ``frame``'s function that replaces ``match``; of several ways, the first that is allowed.

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
            return _Region(way, recording, frame, source, taken).edit()
        except Refusal as refusal:
            reason = refusal
    if match.otherwise is not None:
        return edit_of(match.otherwise, recording, frame, source, taken)
    raise reason


class _Region:
    def __init__(
        self, match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str]
    ) -> None:
        if frame.suspends:
            raise Refusal("a generator or coroutine is not edited")
        check_run(match, recording, frame, source)
        self.match, self.source, self.file = match, source, source.file
        self.texts = Texts(source, frame, recording.executed_in(frame), match.last)
        self._check_result(frame)
        self.statements = Statements(match, self.texts)
        self.stays, self.statement = self.statements.stays, self.statements.statement
        self.spelling = Spelling(match, self.texts, self.statements, taken)
        self.statements.sort_others({name for each in self.spelling.spelled for name in names_in(each)})
        self._check_names()
        check_calls(match, self.texts, self.statements, self.spelling.spelled)
        known = relied_on(match, recording, self.texts, self.spelling.helper)
        self.statements.require([*known, *known_sizes(match, self.texts)])
        self.second = second_of(match, recording, self.texts, self.statements)

    def _check_result(self, frame: Frame) -> None:
        """The expression that stays is the last call of the pattern, and runs nothing else."""
        last = self.match.last
        if last.places[0].frame is not frame:
            raise Refusal(f"the result of {last.op} is made in {last.places[0].frame.code.co_name}")
        stays = self.texts.expression(last)
        own = {node.op for node in self.match.nodes}
        for node in self.texts.nodes:
            place = node.places[0]
            same = place.frame is frame and self.source.at(place.span) is stays
            if same and node not in self.match.nodes and node.op not in own:
                raise Refusal(f"line {stays.lineno}: the same call also runs {node.op}")

    def _check_names(self) -> None:
        """Names that are no longer bound are not read any more, or only under a condition that did not hold."""
        names = Names(self.source, self.stays, self.statement, self.statements.gone, self.statements.parts)
        changed = self.statements.changed
        for read in names.readers():
            if any(part is read for each in changed for part in walked(each)):
                continue
            if not self.statements.assume_unread(read):
                returned = isinstance(self.source.statement(read), ast.Return)
                raise Refusal(f"{read.id} is {'returned' if returned else 'read again'} on line {read.lineno}")

    def edit(self) -> Edit:
        """What changes in the text."""
        inner = {name for part in self.statements.parts for name in bound_names(part)}
        forms = Forms(self.match, self.texts)
        pieces = {
            statement: [
                Replacement(self.file.start(old), self.file.end(old), new)
                for old, new in forms.rewritten(statement, inner)
            ]
            for statement in self.statements.changed
        }
        kept = set(self.statements.kept)
        replacements = [self._removal(statement, pieces) for statement in self.statements.gone]
        replacements += [part for statement, found in pieces.items() if statement not in kept for part in found]
        replacements.append(self._rewritten())
        if self.second is not None:
            replacements += [
                Replacement(self.file.start(old), self.file.end(old), new)
                for old, new in (
                    (self.second.target, f"{self.second.name}, {self.second.target.id}"),
                    (self.second.expression, self.second.name),
                )
            ]
        replacements.sort(key=lambda part: part.start)
        replacements += self._gaps(replacements)
        if self.guarded:
            replacements = [self._guarded(replacements)]
        line = self.stays.lineno
        names = frozenset(self.spelling.names)
        return Edit(self.source, self.match.recipe, line, tuple(replacements), self.spelling.imports, names)

    @property
    def guarded(self) -> bool:
        """Whether the old statements stay, behind conditions."""
        return bool(self.statements.conditions or self.statements.known)

    def _gaps(self, replacements: list[Replacement]) -> list[Replacement]:
        """The empty lines and comments that go with the statements that leave nothing behind."""
        file = self.file
        left = {part.start for part in replacements if not part.text}
        gone = {each for each in self.statements.gone if file.line_starts[each.lineno] in left}
        if not gone:
            return []
        block = self.source.block(self.statement)
        at = min(map(block.index, self.statements.gone))
        above = (block[at - 1].end_lineno or 0) if at else self._head_of(block[0])
        first = block[at].lineno if self.guarded else above + 1
        return gaps(file, range(first, self.statement.lineno), block, gone, opens=self.guarded or not at)

    def _head_of(self, first: ast.stmt) -> int:
        """The last line before a block's first statement that is code."""
        for line in range(first.lineno - 1, 0, -1):
            text = self.file.text[self.file.line_starts[line] : self.file.line_starts[line + 1]].strip()
            if text and not text.startswith(b"#"):
                return line
        return 0

    def _rewritten(self) -> Replacement:
        if self.spelling.hoisted.get(self.statement):
            raise Refusal(f"line {self.statement.lineno} evaluates an operand that cannot be moved")
        text = self.spelling.text(guarded=self.guarded)
        if isinstance(self.stays, ast.AugAssign):
            text = f"{self.file.of(self.stays.target)} = {text}"
        start, end, same = self.file.start(self.stays), self.file.end(self.stays), self.spelling.unchanged
        # What is only repeated is left out, so that another pattern in it can be replaced too.
        if same and text.endswith(same) and self.file.text[start:end].endswith(same.encode()):
            text, end = text.removesuffix(same), end - len(same.encode())
        elif not isinstance(self.stays, ast.AugAssign):
            start, end = self._with_brackets(start, end)
        return Replacement(start, end, text)

    def _with_brackets(self, start: int, end: int) -> tuple[int, int]:
        """The same with the brackets around an operator, which a call in its place needs no more."""
        before, after = self.file.text[:start].rstrip(), self.file.text[end:].lstrip()
        if not isinstance(self.stays, ast.BinOp) or not before.endswith(b"(") or not after.startswith(b")"):
            return start, end
        above = before[:-1].rstrip()
        word = re.search(rb"\w+$", above)
        called = word is not None and (above == before[:-1] or not keyword.iskeyword(word[0].decode()))
        if called or above.endswith((b")", b"]", b"'", b'"')):
            return start, end
        return len(before) - 1, len(self.file.text) - len(after) + 1

    def _removal(self, statement: ast.stmt, pieces: dict[ast.stmt, list[Replacement]]) -> Replacement:
        """A statement's lines away, but for what stays of it."""
        file, indent = self.file, self.file.indent(statement)
        start, end = file.start(statement), file.end(statement)
        lines: list[str] = []
        for part in sorted(statements_in([statement]), key=file.start):
            lines += self.spelling.hoisted.get(part, [])
            if part in self.statements.kept:
                lines.append(self._moved(part, pieces.get(part, []), statement.col_offset))
        if lines:
            return Replacement(start, end, f"\n{indent}".join(lines))
        line_start, line_end = file.line_starts[statement.lineno], file.line_starts[(statement.end_lineno or 0) + 1]
        if file.text[line_start:start].strip():
            raise Refusal(f"line {statement.lineno} holds several statements")
        rest = file.text[end:line_end].strip()
        if rest and not rest.startswith(b"#"):
            raise Refusal(f"line {statement.lineno} holds several statements")
        return Replacement(line_start, line_end, "")

    def _moved(self, statement: ast.stmt, pieces: list[Replacement], indent: int) -> str:
        """The text of a statement inside a condition, to stand where the condition stood."""
        self._check_one_line_texts(statement)
        start = self.file.start(statement)
        old = self.file.text[start : self.file.end(statement)]
        new = edited(old, _moved_to(start, pieces)).decode()
        first, *rest = new.split("\n")
        less = statement.col_offset - indent
        return "\n".join([first, *(line[min(less, len(line) - len(line.lstrip())) :] for line in rest)])

    def _guarded(self, replacements: list[Replacement]) -> Replacement:
        """The new statements where the conditions are as they were; else the old ones."""
        file, statement = self.file, self.statement
        start = file.line_starts[min((each.lineno for each in self.statements.gone), default=statement.lineno)]
        end = file.line_starts[(statement.end_lineno or 0) + 1]
        block = self.source.block(statement)
        for each in block:
            if start <= file.start(each) < end:
                self._check_one_line_texts(each)
        if file.text[file.end(statement) : end].strip().startswith(b";"):
            raise Refusal(f"line {statement.lineno} holds several statements")
        if file.text[start : file.start(statement)].strip() and not self.statements.gone:
            raise Refusal(f"line {statement.lineno} holds several statements")
        new = edited(file.text[start:end], _moved_to(start, replacements))
        conditions = self.statements.conditions
        tests = dict.fromkeys(spelled_condition(file.of(test), test, outcome) for test, outcome in conditions)
        decided = otherwise(file, conditions, start, end) if len(tests) == 1 and not self.statements.known else None
        old = edited(file.text[start:end], _moved_to(start, decided.replacements) if decided else [])
        tests |= dict.fromkeys(each.text for each in self.statements.known)
        indent, step = file.indent(statement), file.step(statement)
        sides = [(" and ".join(tests), new), ("", old)]
        if decided and decided.first:
            test, outcome = conditions[0]
            sides = [(spelled_condition(file.of(test), test, not outcome), old), ("", new)]
        lines = []
        for condition, text in sides:
            lines += [f"{indent}if {condition}:" if condition else f"{indent}else:", *_indented(text, step)]
        return Replacement(start, end, "\n".join(lines) + "\n")

    def _check_one_line_texts(self, statement: ast.stmt) -> None:
        for part in walked(statement):
            if isinstance(part, (ast.Constant, ast.JoinedStr)) and part.lineno != part.end_lineno:
                raise Refusal(f"line {part.lineno}: a text of several lines cannot be indented")


def _moved_to(start: int, replacements: list[Replacement]) -> list[Replacement]:
    """The same, of a text that begins at ``start``."""
    return [dataclasses.replace(part, start=part.start - start, end=part.end - start) for part in replacements]


def _indented(text: bytes, step: str) -> list[str]:
    return [f"{step}{line}" if line.strip() else line for line in text.decode().strip("\n").split("\n")]
