"""Which names that removed statements bind are live: read later, in the function or in one inside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.dead_code import LOOPS, Condition, DeadCode, check_asked_first, condition_of, removal_start
from gradscope.patching.edit.expressions import bound_between
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.syntax import is_name, reads_only, targets, walked, within


def live_reads(dead: DeadCode, calls: CallSites) -> Iterator[ast.Name]:
    """Yield the reads, or what may read, of names that removed statements bind and no other statement binds anew.

    Raises:
        Refusal: another round of a loop, a nested function or ``locals()`` may read one.
    """
    for name in sorted(dead.bound):
        yield from [read for read in calls.source.names(name) if _is_live(read, dead, calls)]
        _check_nested(name, calls)


def _is_live(read: ast.Name, dead: DeadCode, calls: CallSites) -> bool:
    """Return whether ``read`` reads, or may read, what a removed statement bound."""
    source, name, own = calls.source, read.id, calls.statement
    home = source.statement(read)
    if any(within(statement, read) for statement in dead.gone) or within(calls.stays, read):
        return False
    if source.file.start(read) < removal_start(dead, calls):
        looping = source.inside(calls.stays, LOOPS)
        if not looping or not isinstance(read.ctx, ast.Load) or _is_bound_above(read, calls):
            return False
        raise Refusal(f"{name} is read again in the next round of the loop")
    if home is own and isinstance(read.ctx, ast.Store):
        return False
    if name in targets(own) and not (home is own and isinstance(read.ctx, ast.Load)):
        return False
    if isinstance(read.ctx, ast.Store) and not isinstance(home, ast.AugAssign):
        return False
    return not _is_bound_since(read, calls)


def _is_bound_above(read: ast.Name, calls: CallSites) -> bool:
    """Return whether an assignment in the same block stands between the loop's start and ``read``."""
    home = calls.source.statement(read)
    block = calls.source.block(home)
    return any(read.id in targets(statement) for statement in block[: block.index(home)])


def _is_bound_since(read: ast.Name, calls: CallSites) -> bool:
    """Return whether a statement that always runs binds the name anew between the result and ``read``."""
    source = calls.source
    home: ast.AST = source.statement(read)
    after = source.file.start(calls.statement)
    while home is not source.definition:
        if isinstance(home, ast.stmt):
            block = source.block(home)
            for statement in block[: block.index(home)]:
                binds = read.id in targets(statement) and not isinstance(statement, ast.AugAssign)
                if binds and source.file.start(statement) > after:
                    return True
        home = source.file.parents[home]
    return False


def _check_nested(name: str, calls: CallSites) -> None:
    """Raise Refusal where code that is not followed may read ``name``."""
    source = calls.source
    if name in source.not_local:
        raise Refusal(f"{name} is not a local name")
    if any(is_name(inner, name) for part in source.nested for inner in walked(part)):
        raise Refusal(f"{name} is also a name inside a nested function")
    for reader in ("locals", "eval", "exec", "vars"):
        if source.names(reader):
            raise Refusal(f"{reader}() may read any name")


def conditions_of_later_reads(dead: DeadCode, calls: CallSites, bound: str | None = None) -> Iterator[Condition]:
    """Yield the conditions under which no live name that a removed statement binds is read.

    ``bound``: a name that the new code binds to the same tensor.

    Raises:
        Refusal: one is read whatever the conditions, or was in the recorded step.
    """
    for read in list(live_reads(dead, calls)):
        if read.id == bound or any(part is read for each in dead.changed for part in walked(each)):
            continue
        condition = _kept_off(read, dead, calls)
        if condition is None:
            returned = isinstance(calls.source.statement(read), ast.Return)
            raise Refusal(f"{read.id} is {'returned' if returned else 'read again'} on line {read.lineno}")
        yield condition


def _kept_off(read: ast.Name, dead: DeadCode, calls: CallSites) -> Condition | None:
    """Return a condition around ``read`` that kept it from running, and that can be asked before; None without one."""
    part: ast.AST = read
    while part is not calls.source.definition:
        above = calls.source.file.parents[part]
        sides = []
        if isinstance(above, ast.IfExp):
            sides = [above.body is part, above.orelse is part]
        elif isinstance(above, ast.If) and not within(above, calls.statement):
            sides = [part in above.body, part in above.orelse]
        if any(sides):
            test: ast.expr = above.test  # type: ignore[attr-defined]
            outcome = not sides[0]
            if calls.truth(test) is outcome and _is_free(test, read, dead, calls):
                check_asked_first(test, dead, calls)
                return condition_of(test, outcome)
        part = above
    return None


def _is_free(test: ast.expr, read: ast.Name, dead: DeadCode, calls: CallSites) -> bool:
    """Return whether ``test`` is the same before the match: nothing binds a name of it up to ``read``."""
    end = calls.source.file.start(read)
    return reads_only(test) and not bound_between(test, removal_start(dead, calls), end, calls)
