"""Whether names that an edit no longer binds are read again."""

from __future__ import annotations

import ast

from gradscope.patching.edit.refusal import Refusal
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import bound_names, is_name, targets, walked, within


class Names:
    """The names of one function around an edit.

    Args:
        source: the function.
        stays: the expression that is rewritten, in ``statement``.
        gone: the statements that go, as they stand in the block of ``statement``.
        parts: the simple statements that go; with those of a condition that ran.
    """

    def __init__(
        self,
        source: FunctionSource,
        stays: ast.AST,
        statement: ast.stmt,
        gone: list[ast.stmt],
        parts: list[ast.stmt],
    ) -> None:
        self.source, self.stays, self.statement, self.gone, self.parts = source, stays, statement, gone, parts
        file = source.file
        self.begin = min((file.start(each) for each in gone), default=file.start(statement))
        self.looping = source.inside(stays, (ast.For, ast.While, ast.AsyncFor))

    def readers(self) -> list[ast.Name]:
        """Where a name is read, or may be, that is no longer bound."""
        found = []
        for name in sorted({name for part in self.parts for name in bound_names(part)}):
            found += [other for other in self.source.names(name) if self._reads_again(other, name)]
            self._check_nested(name)
        return found

    def _reads_again(self, other: ast.Name, name: str) -> bool:
        home = self.source.statement(other)
        if any(within(statement, other) for statement in self.gone) or within(self.stays, other):
            return False
        if self.source.file.start(other) < self.begin:
            if not self.looping or not isinstance(other.ctx, ast.Load) or self._bound_before(other, name):
                return False
            raise Refusal(f"{name} is read again in the next round of the loop")
        if home is self.statement and isinstance(other.ctx, ast.Store):
            return False
        if name in targets(self.statement) and not (home is self.statement and isinstance(other.ctx, ast.Load)):
            return False
        if isinstance(other.ctx, ast.Store) and not isinstance(home, ast.AugAssign):
            return False
        return not self._bound_between(other, name)

    def _bound_before(self, read: ast.Name, name: str) -> bool:
        """Whether an assignment in the same block stands between the loop's start and ``read``."""
        home = self.source.statement(read)
        block = self.source.block(home)
        return any(name in targets(statement) for statement in block[: block.index(home)])

    def _bound_between(self, read: ast.Name, name: str) -> bool:
        """Whether the name is bound anew, for certain, between the result and ``read``."""
        home: ast.AST = self.source.statement(read)
        after = self.source.file.start(self.statement)
        while home is not self.source.definition:
            if isinstance(home, ast.stmt):
                block = self.source.block(home)
                for statement in block[: block.index(home)]:
                    binds = name in targets(statement) and not isinstance(statement, ast.AugAssign)
                    if binds and self.source.file.start(statement) > after:
                        return True
            home = self.source.file.parents[home]
        return False

    def _check_nested(self, name: str) -> None:
        if name in self.source.not_local:
            raise Refusal(f"{name} is not a local name")
        if any(is_name(inner, name) for part in self.source.nested for inner in walked(part)):
            raise Refusal(f"{name} is also a name inside a nested function")
        for reader in ("locals", "eval", "exec", "vars"):
            if self.source.names(reader):
                raise Refusal(f"{reader}() may read any name")
