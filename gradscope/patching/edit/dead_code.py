"""Which statements go with a pattern, which stay, and under which conditions the pattern ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.patching.conditions import Known
from gradscope.patching.edit.call_sites import Texts
from gradscope.patching.edit.reading import reads_only
from gradscope.patching.edit.refusal import Refusal
from gradscope.patching.edit.shape_queries import only_forms
from gradscope.patching.edit.side_effects import check_only_serves, hands_on
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import (
    HIDES,
    bound_names,
    calls_something,
    is_name,
    is_the_same_for_each,
    names_in,
    only_checks,
    statements_in,
    targets,
    walked,
    within,
)
from gradscope.patching.match import Match
from gradscope.recording.graph import Node


class Statements:
    """The statements before the result, of its own block, that only serve the match.

    Args:
        match: what goes.
        texts: the spellings in the function.

    Attributes:
        stays: the expression that is rewritten, in ``statement``.
        gone: what goes of the block.
        parts: the simple statements in it, without those that stay.
        kept: statements inside a condition that goes, which stay.
        changed: statements that stay and ask for the form of a tensor that is no longer made.
        conditions: a test, and whether it held.
        known: numbers that were relied on, as tests too.

    Raises:
        Refusal: they do more than that.
    """

    def __init__(self, match: Match, texts: Texts) -> None:
        self.match, self.texts, self.stays = match, texts, texts.expression(match.last)
        self.source: FunctionSource = texts.source
        self.statement = self.source.statement(self.stays)
        self.block = self.source.block(self.statement)
        self.gone: list[ast.stmt] = []
        self.parts: list[ast.stmt] = []
        self.kept: list[ast.stmt] = []
        self.changed: list[ast.stmt] = []
        self.conditions: list[tuple[ast.expr, bool]] = []
        self.known: list[Known] = []
        self._loose: list[ast.stmt] = []  # of a branch that ran, and no part of the pattern
        self._dead: set[ast.stmt] = set()
        self._find_own()

    def _find_own(self) -> None:
        own = {self.source.statement(self.texts.expression(node)) for node in self.match.nodes}
        own.discard(self.statement)
        for node in self.match.nodes:
            expression = self.texts.expression(node)
            if self.source.statement(expression) is self.statement and not within(self.stays, expression):
                raise Refusal(f"line {self.statement.lineno} uses the pattern's parts twice")
        for statement in sorted(own, key=self.source.file.start):
            self._check_own(statement)
            top = self._top(statement)
            if self.block.index(top) > self.block.index(self.statement):
                raise Refusal(f"line {top.lineno} stands behind the result: the pattern spans two rounds of a loop")
            if top not in self.gone:
                self.gone.append(top)
                if isinstance(top, ast.If):
                    self._take_branch(top, own)
                else:
                    self.parts.append(top)
        self._check_stays()

    def sort_others(self, needed: set[str]) -> None:
        """Tell what else goes and what stays, where the new text reads the names ``needed``.

        Raises:
            Refusal: a statement between does more with inner tensors than can be understood.
        """
        self.needed = set(needed)
        self._sort_others()
        self.gone.sort(key=self.block.index)
        self.parts.sort(key=self.source.file.start)
        self._check_conditions()
        for statement in self.parts:
            check_only_serves(self, statement)

    def _top(self, statement: ast.stmt) -> ast.stmt:
        """The statement of the block that is or holds ``statement``, over conditions only."""
        top: ast.AST = statement
        while top not in self.block:
            top = self.source.file.parents[top]
            if within(top, self.statement):
                raise Refusal(f"line {statement.lineno} stands outside of the block in which the result is made")
            if not isinstance(top, ast.If):
                raise Refusal(f"line {statement.lineno} runs in a loop, a with or a try of its own")
        assert isinstance(top, ast.stmt)
        return top

    def _take_branch(self, branch: ast.If, own: set[ast.stmt]) -> None:
        """The side of a condition that ran."""
        inside = [bool(own & set(statements_in(side))) for side in (branch.body, branch.orelse)]
        if all(inside):
            raise Refusal(f"line {branch.lineno}: both sides of a condition ran")
        self._assume(branch.test, inside[0])
        for statement in branch.body if inside[0] else branch.orelse:
            if isinstance(statement, ast.If) and own & set(statements_in([statement])):
                self._take_branch(statement, own)
            elif statement in own:
                self.parts.append(statement)
            else:
                self._loose.append(statement)

    def _sort_others(self) -> None:
        """What else stands between, from the last to the first: names that nobody needs any more are not made."""
        first = min(map(self.block.index, self.gone), default=self.block.index(self.statement))
        between = self.block[first : self.block.index(self.statement)]
        others = [statement for statement in between if statement not in self.gone] + self._loose
        inner = {name for part in self.parts for name in bound_names(part)}
        looked = {
            name for each in others if inner & names_in(each) and only_forms(each, inner) for name in targets(each)
        }
        for statement in sorted(others, key=self.source.file.start, reverse=True):
            if not (inner | looked) & names_in(statement):
                stays = True
            elif not inner & names_in(statement):
                stays = not self._goes_with(statement)
            else:
                stays = self._stays(statement, inner)
            if stays:
                self.needed |= names_in(statement)
                if statement in self._loose:
                    self.kept.append(statement)
            elif statement not in self._loose:
                self.gone.append(statement)
        self.kept.sort(key=self.source.file.start)

    def _stays(self, statement: ast.stmt, inner: set[str]) -> bool:
        """Whether a statement that uses inner tensors stays; it does where it asks for their form only.

        Raises:
            Refusal: it does more.
        """
        if hands_on(self.texts, statement):
            self.parts.append(statement)
            return False
        if only_forms(statement, inner):
            if only_checks(statement):
                self._dead.add(statement)
                return False
            if isinstance(statement, ast.Assign) and self._unread(statement):
                self._dead.add(statement)
                self.parts.append(statement)
                return False
            self.changed.append(statement)
            return True
        if isinstance(statement, ast.If):
            self._skip_branch(statement)
            return False
        if self._skips(statement):
            return False
        names = ", ".join(sorted(inner & names_in(statement)))
        raise Refusal(f"line {statement.lineno} uses {names} on another path")

    def _goes_with(self, statement: ast.stmt) -> bool:
        """Whether it makes a number of an inner tensor's form that nobody needs any more."""
        if not isinstance(statement, ast.Assign) or not reads_only(statement.value) or not self._unread(statement):
            return False
        self._dead.add(statement)
        self.parts.append(statement)
        return True

    def _unread(self, statement: ast.Assign) -> bool:
        """Whether the names it binds serve what goes, and nothing else."""
        bound = targets(statement)
        if not bound or bound & self.needed:
            return False
        goes = [*self.parts, *self._dead, statement]
        start = self.source.file.start(statement)
        for name in bound:
            for other in self.source.names(name):
                read = isinstance(other.ctx, ast.Load) and self.source.file.start(other) > start
                if read and not any(within(part, other) for part in goes):
                    return False
        return not self.source.inside(statement, (ast.For, ast.While, ast.AsyncFor))

    def _skip_branch(self, branch: ast.If) -> None:
        """A condition whose side would change an inner tensor, and that did not run."""
        if branch.orelse:
            raise Refusal(f"line {branch.lineno}: which side of the condition ran is not known")
        if any(True for _ in self._run_in(branch.body)):
            raise Refusal(f"line {branch.lineno}: a condition held in the pattern")
        if not any(calls_something(statement) for statement in branch.body):
            raise Refusal(f"line {branch.lineno}: whether the condition held is not known")
        self._assume(branch.test, False)

    def _skips(self, statement: ast.stmt) -> bool:
        """``x = self.drop(x) if self.training else x`` where the name was taken."""
        value = statement.value if isinstance(statement, ast.Assign) else None
        if not isinstance(value, ast.IfExp) or len(targets(statement)) != 1:
            return False
        (name,) = targets(statement)
        sides = [is_name(value.body, name), is_name(value.orelse, name)]
        if sum(sides) != 1 or any(True for _ in self._run_in([statement])):
            return False
        if not calls_something(statement):
            return False
        self._assume(value.test, sides[0])
        self.parts.append(statement)
        return True

    def _run_in(self, statements: list[ast.stmt]) -> Iterator[Node]:
        """The calls that were made there."""
        lines = range(statements[0].lineno, (statements[-1].end_lineno or 0) + 1)
        for node in self.texts.nodes:
            place = node.place_in(self.texts.frame)
            if place is not None and place.span is not None and place.span.line in lines:
                yield node

    def _assume(self, test: ast.expr, outcome: bool) -> None:
        """The new code is for this outcome; else the old one runs."""
        if not reads_only(test):
            raise Refusal(f"line {test.lineno}: the condition cannot be asked earlier")
        self.conditions.append((test, outcome))

    def assume_unread(self, read: ast.Name) -> bool:
        """Make it a condition that a later branch, which did not run, does not; whether that can be done."""
        part: ast.AST = read
        while part is not self.source.definition:
            above = self.source.file.parents[part]
            sides = []
            if isinstance(above, ast.IfExp):
                sides = [above.body is part, above.orelse is part]
            elif isinstance(above, ast.If) and not within(above, self.statement):
                sides = [part in above.body, part in above.orelse]
            if any(sides):
                outcome = not sides[0]
                test = above.test  # type: ignore[attr-defined]
                if self.texts.truth(test) is outcome and self._is_free(test, read):
                    self._assume(test, outcome)
                    self._check_conditions()
                    return True
            part = above
        return False

    def _is_free(self, test: ast.expr, read: ast.Name) -> bool:
        """Whether the test gives the same before the pattern: none of its names is bound on the way."""
        return reads_only(test) and not self.texts.bound_between(test, self.begin, self.source.file.start(read))

    @property
    def begin(self) -> int:
        """Where what goes begins."""
        return min([self.source.file.start(each) for each in (*self.gone, self.statement)])

    def require(self, known: list[Known]) -> None:
        """The new code is for these numbers; else the old one runs.

        Raises:
            Refusal: one cannot be asked for before the pattern.
        """
        for each in known:
            if not reads_only(each.expression):
                raise Refusal(f"line {each.expression.lineno}: {self._text(each)} may be another number next time")
        self.known = known
        self._check_conditions()

    def _text(self, known: Known) -> str:
        return self.source.file.of(known.expression)

    def _check_conditions(self) -> None:
        """All conditions are asked before the first statement that goes."""
        inner = {name for part in self.parts for name in bound_names(part)}
        here = [each.expression for each in self.known if within(self.source.definition, each.expression)]
        for test in [*(test for test, _ in self.conditions), *here]:
            end = max(self.source.file.start(test), self.source.file.start(self.statement))
            name = next((name for name in sorted(names_in(test)) if name in inner), None)
            if name is not None:
                raise Refusal(f"a condition asks for {name}, which is not made any more")
            if self.texts.bound_between(test, self.begin, end):
                raise Refusal(f"line {test.lineno}: the condition cannot be asked earlier")

    def _check_own(self, statement: ast.stmt) -> None:
        for part in walked(statement):
            if isinstance(part, HIDES) and not is_the_same_for_each(part):
                raise Refusal(f"line {part.lineno} holds a lambda, a comprehension or an assignment inside")
            if isinstance(part, ast.BoolOp) and self._made_in(part):
                raise Refusal(f"line {part.lineno} holds a condition")
            if isinstance(part, ast.IfExp) and (made := self._made_in(part)):
                inside = [any(within(side, each) for each in made) for side in (part.body, part.orelse)]
                if all(inside) or any(within(part.test, each) for each in made):
                    raise Refusal(f"line {part.lineno}: both sides of a condition ran")
                self._assume(part.test, inside[0])

    def _made_in(self, part: ast.AST) -> list[ast.AST]:
        """The calls of the match inside ``part``."""
        return [found for found in map(self.texts.expression, self.match.nodes) if within(part, found)]

    def _check_stays(self) -> None:
        for part in walked(self.stays):
            if isinstance(part, HIDES) or (isinstance(part, (ast.IfExp, ast.BoolOp)) and self._made_in(part)):
                raise Refusal(f"line {part.lineno} holds a condition, a lambda or a comprehension")
        if self.source.inside(self.stays, HIDES):
            raise Refusal(f"line {self.stays.lineno} stands in a lambda or a comprehension")
        above: ast.AST = self.stays
        while not isinstance(above, ast.stmt):
            above = self.source.file.parents[above]
            if isinstance(above, (ast.IfExp, ast.BoolOp)):
                raise Refusal(f"line {self.stays.lineno} runs under a condition of its own")
