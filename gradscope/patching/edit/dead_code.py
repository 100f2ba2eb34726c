"""Which statements are dead once a match is replaced, under which conditions, and which of their names live on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.expressions import bound_between, only_forms
from gradscope.patching.edit.side_effects import is_identity, unchanged_guard
from gradscope.patching.edit.source import Refusal, SourceGuard
from gradscope.patching.edit.syntax import (
    HIDES,
    bound_names,
    calls_something,
    is_name,
    is_the_same_for_each,
    names_in,
    only_checks,
    reads_only,
    statements_in,
    targets,
    walked,
    within,
)
from gradscope.patching.match.match import Match

LOOPS = (ast.For, ast.While, ast.AsyncFor)

Condition = tuple[ast.expr, bool]  # a test, and its outcome in the recorded step


@dataclass
class OwnStatements:
    """The statements that make the tensors of a match, but for the one that holds the result.

    Attributes:
        gone: those of the result's block that are or hold one.
        parts: the simple statements themselves.
        others: statements beside them in a branch that ran.
        conditions: the conditions that they ran under.
    """

    gone: list[ast.stmt] = field(default_factory=list)
    parts: list[ast.stmt] = field(default_factory=list)
    others: list[ast.stmt] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)


@dataclass
class DeadCode:
    """The statements in front of the result that serve the match alone, and those that stay among them.

    Attributes:
        gone: statements of the result's block that are removed.
        parts: the simple statements in them that are removed.
        kept: statements inside a removed ``if`` that stay.
        changed: statements that stay and ask a removed tensor for its shape, dtype or device.
        checks: removed statements that only check a removed tensor.
        unchanging: removed calls of helpers that returned a removed tensor as it was, and the conditions for that.
        conditions: the conditions that the match ran under; the new code is for these outcomes.
    """

    gone: list[ast.stmt]
    parts: list[ast.stmt]
    conditions: list[Condition]
    kept: list[ast.stmt] = field(default_factory=list)
    changed: list[ast.stmt] = field(default_factory=list)
    checks: list[ast.stmt] = field(default_factory=list)
    unchanging: dict[ast.stmt, SourceGuard] = field(default_factory=dict)

    @property
    def bound(self) -> set[str]:
        """The names that removed statements bind."""
        return {name for part in self.parts for name in bound_names(part)}


def own_statements(match: Match, calls: CallSites) -> OwnStatements:
    """Find the statements that make the tensors of ``match``.

    Raises:
        Refusal: one of them need not run whenever the result is made, or does more than the match.
    """
    homes = {calls.source.statement(calls.expression(node)) for node in match.nodes} - {calls.statement}
    for node in match.nodes:
        expression = calls.expression(node)
        if calls.source.statement(expression) is calls.statement and not within(calls.stays, expression):
            raise Refusal(f"line {calls.statement.lineno} uses an intermediate result of the pattern twice")
    own = OwnStatements()
    for statement in sorted(homes, key=calls.source.file.start):
        own.conditions += _conditions_in(statement, match, calls)
        top = _in_block(statement, calls)
        if calls.block.index(top) > calls.block.index(calls.statement):
            raise Refusal(f"line {top.lineno} comes after the result: the pattern spans two loop iterations")
        if top not in own.gone:
            own.gone.append(top)
            if isinstance(top, ast.If):
                _take_branch(top, homes, own)
            else:
                own.parts.append(top)
    _check_unconditional(match, calls)
    return own


def _in_block(statement: ast.stmt, calls: CallSites) -> ast.stmt:
    """Return the statement of the result's block that is or holds ``statement``, over conditions only."""
    top: ast.AST = statement
    while top not in calls.block:
        top = calls.source.file.parents[top]
        if within(top, calls.statement):
            raise Refusal(f"line {statement.lineno} is outside the block that computes the result")
        if not isinstance(top, ast.If):
            raise Refusal(f"line {statement.lineno} is in a separate loop, with or try block")
    assert isinstance(top, ast.stmt)
    return top


def _take_branch(branch: ast.If, homes: set[ast.stmt], own: OwnStatements) -> None:
    """Add the side of ``branch`` that ran to ``own``."""
    inside = [bool(homes & set(statements_in(side))) for side in (branch.body, branch.orelse)]
    if all(inside):
        raise Refusal(f"line {branch.lineno}: both branches of a condition ran")
    own.conditions.append(condition_of(branch.test, inside[0]))
    for statement in branch.body if inside[0] else branch.orelse:
        if isinstance(statement, ast.If) and homes & set(statements_in([statement])):
            _take_branch(statement, homes, own)
        elif statement in homes:
            own.parts.append(statement)
        else:
            own.others.append(statement)


def _conditions_in(statement: ast.stmt, match: Match, calls: CallSites) -> Iterator[Condition]:
    """Yield the conditional expressions in ``statement`` that ``match`` ran under."""
    for part in walked(statement):
        if isinstance(part, HIDES) and not is_the_same_for_each(part):
            raise Refusal(f"line {part.lineno} contains a lambda, a comprehension or an assignment expression")
        if isinstance(part, ast.BoolOp) and _made_in(part, match, calls):
            raise Refusal(f"line {part.lineno} contains a condition")
        if isinstance(part, ast.IfExp) and (made := _made_in(part, match, calls)):
            inside = [any(within(side, each) for each in made) for side in (part.body, part.orelse)]
            if all(inside) or any(within(part.test, each) for each in made):
                raise Refusal(f"line {part.lineno}: both branches of a condition ran")
            yield condition_of(part.test, inside[0])


def _check_unconditional(match: Match, calls: CallSites) -> None:
    """Raise Refusal where the result, or a part of it, is evaluated under a condition or several times."""
    for part in walked(calls.stays):
        if isinstance(part, HIDES) or (isinstance(part, (ast.IfExp, ast.BoolOp)) and _made_in(part, match, calls)):
            raise Refusal(f"line {part.lineno} contains a condition, a lambda or a comprehension")
    if calls.source.inside(calls.stays, HIDES):
        raise Refusal(f"line {calls.stays.lineno} is in a lambda or a comprehension")
    above: ast.AST = calls.stays
    while not isinstance(above, ast.stmt):
        above = calls.source.file.parents[above]
        if isinstance(above, (ast.IfExp, ast.BoolOp)):
            raise Refusal(f"line {calls.stays.lineno} runs under a separate condition")


def _made_in(part: ast.AST, match: Match, calls: CallSites) -> list[ast.AST]:
    """Return the expressions inside ``part`` that made tensors of ``match``."""
    return [found for found in map(calls.expression, match.nodes) if within(part, found)]


def condition_of(test: ast.expr, outcome: bool) -> Condition:
    """Return ``test`` as a condition of the new code; with another outcome the old code runs."""
    if not reads_only(test):
        raise Refusal(f"line {test.lineno}: the condition cannot be evaluated earlier")
    return test, outcome


def dead_code(calls: CallSites, own: OwnStatements, needed: set[str]) -> DeadCode:
    """Sort the statements between the first of ``own`` and the result: which are removed, which stay.

    From the last to the first: a name that no later statement needs is not made. ``needed`` are the names that the new
    call reads.

    Raises:
        Refusal: a statement between uses a removed tensor in a way that is not understood.
    """
    dead = DeadCode([*own.gone], [*own.parts], [*own.conditions])
    needed = set(needed)
    first = min(map(calls.block.index, dead.gone), default=calls.block.index(calls.statement))
    between = calls.block[first : calls.block.index(calls.statement)]
    others = [statement for statement in between if statement not in dead.gone] + own.others
    inner = dead.bound
    sizes = {name for each in others if inner & names_in(each) and only_forms(each, inner) for name in targets(each)}
    for statement in sorted(others, key=calls.source.file.start, reverse=True):
        if not (inner | sizes) & names_in(statement):
            stays = True
        elif not inner & names_in(statement):
            stays = not _is_dead_size(statement, needed, dead, calls)
        else:
            stays = _stays(statement, inner, needed, dead, calls)
        if stays:
            needed |= names_in(statement)
            if statement in own.others:
                dead.kept.append(statement)
        elif statement not in own.others:
            dead.gone.append(statement)
    dead.kept.sort(key=calls.source.file.start)
    dead.gone.sort(key=calls.block.index)
    dead.parts.sort(key=calls.source.file.start)
    for test, _ in dead.conditions:
        check_asked_first(test, dead, calls)
    return dead


def _stays(statement: ast.stmt, inner: set[str], needed: set[str], dead: DeadCode, calls: CallSites) -> bool:
    """Return whether ``statement``, which uses removed tensors ``inner``, stays: it asks for their shape alone.

    Raises:
        Refusal: it does more, and it is not known that it did nothing in the recorded step.
    """
    if _is_identity_call(statement, calls):
        dead.parts.append(statement)
        return False
    if only_forms(statement, inner):
        if only_checks(statement):
            dead.checks.append(statement)
            return False
        if isinstance(statement, ast.Assign) and _is_unread(statement, needed, dead, calls):
            dead.parts.append(statement)
            return False
        dead.changed.append(statement)
        return True
    guard = unchanged_guard(statement, calls)
    if guard is not None:
        dead.parts.append(statement)
        dead.unchanging[statement] = guard
        return False
    skipped = _skipped(statement, calls)
    if skipped is None:
        names = ", ".join(sorted(inner & names_in(statement)))
        raise Refusal(f"line {statement.lineno} uses {names} on another path")
    dead.conditions.append(skipped)
    if not isinstance(statement, ast.If):
        dead.parts.append(statement)
    return False


def _is_identity_call(statement: ast.stmt, calls: CallSites) -> bool:
    """Return whether it is ``x = self.drop(x)`` of an ``nn.Identity``; or ``q, k = self.norm(q), self.norm(k)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        if len(target.elts) != len(value.elts):
            return False
        pairs = list(zip(target.elts, value.elts, strict=True))
    return all(isinstance(name, ast.Name) and _applies_identity(call, name.id, calls) for name, call in pairs)


def _applies_identity(call: ast.expr, name: str, calls: CallSites) -> bool:
    if not isinstance(call, ast.Call) or call.keywords or not is_identity(calls.called_module(call)):
        return False
    return len(call.args) == 1 and is_name(call.args[0], name)


def _is_dead_size(statement: ast.stmt, needed: set[str], dead: DeadCode, calls: CallSites) -> bool:
    """Return whether ``statement`` makes a number of a removed tensor's shape that nothing else reads; remove it."""
    if not isinstance(statement, ast.Assign) or not reads_only(statement.value):
        return False
    if not _is_unread(statement, needed, dead, calls):
        return False
    dead.parts.append(statement)
    return True


def _is_unread(statement: ast.Assign, needed: set[str], dead: DeadCode, calls: CallSites) -> bool:
    """Return whether only removed statements read the names that ``statement`` binds."""
    bound = targets(statement)
    if not bound or bound & needed:
        return False
    removed = [*dead.parts, *dead.checks, statement]
    start = calls.source.file.start(statement)
    for name in bound:
        for other in calls.source.names(name):
            read = isinstance(other.ctx, ast.Load) and calls.source.file.start(other) > start
            if read and not any(within(part, other) for part in removed):
                return False
    return not calls.source.inside(statement, LOOPS)


def _skipped(statement: ast.stmt, calls: CallSites) -> Condition | None:
    """Return the condition that kept ``statement`` from changing a removed tensor; None where there is none.

    Raises:
        Refusal: there is one, and it held, or its outcome is not known.
    """
    if isinstance(statement, ast.If):
        if statement.orelse:
            raise Refusal(f"line {statement.lineno}: cannot tell which branch of the condition ran")
        if _ran(statement.body, calls):
            raise Refusal(f"line {statement.lineno}: a condition inside the pattern was true")
        if not any(calls_something(each) for each in statement.body):
            raise Refusal(f"line {statement.lineno}: cannot tell whether the condition was true")
        return condition_of(statement.test, False)
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.IfExp) or len(targets(statement)) != 1:
        return None
    (name,) = targets(statement)  # x = self.drop(x) if self.training else x
    sides = [is_name(value.body, name), is_name(value.orelse, name)]
    if sum(sides) != 1 or _ran([statement], calls) or not calls_something(statement):
        return None
    return condition_of(value.test, sides[0])


def _ran(statements: list[ast.stmt], calls: CallSites) -> bool:
    """Return whether a recorded call was made on the lines of ``statements``."""
    lines = range(statements[0].lineno, (statements[-1].end_lineno or 0) + 1)
    places = (node.place_in(calls.frame) for node in calls.nodes)
    return any(place is not None and place.span is not None and place.span.line in lines for place in places)


def removal_start(dead: DeadCode, calls: CallSites) -> int:
    """Return the offset of the first statement that is removed or rewritten."""
    return min(calls.source.file.start(each) for each in (*dead.gone, calls.statement))


def check_asked_first(test: ast.expr, dead: DeadCode, calls: CallSites) -> None:
    """Raise Refusal where ``test`` cannot be evaluated before the first removed statement with the same outcome."""
    file = calls.source.file
    end = max(file.start(test), file.start(calls.statement))
    name = min(names_in(test) & dead.bound, default=None)
    if name is not None:
        raise Refusal(f"a condition reads {name}, which would no longer exist")
    if bound_between(test, removal_start(dead, calls), end, calls):
        raise Refusal(f"line {test.lineno}: the condition cannot be evaluated earlier")


# Which names that removed statements bind are live: read later, in the function or in one inside it.


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
        raise Refusal(f"{name} is read again in the next loop iteration")
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
        raise Refusal(f"{name} is not a local variable")
    if any(is_name(inner, name) for part in source.nested for inner in walked(part)):
        raise Refusal(f"{name} is also a variable of a nested function")
    for reader in ("locals", "eval", "exec", "vars"):
        if source.names(reader):
            raise Refusal(f"{reader}() can read any variable")


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
