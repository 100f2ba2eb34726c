"""A new call with two results: the tensor that stays, and what a later call made of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.syntax import names_in, walked
from gradscope.patching.match import Match
from gradscope.recording.graph import Recording

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_UNDER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.NamedExpr)


@dataclass(frozen=True)
class Second:
    """Where the later call stands, what its result is called, and the assignment's target that becomes two."""

    expression: ast.expr
    name: str
    target: ast.Name


def second_of(match: Match, recording: Recording, calls: CallSites, *, conditional: bool) -> Second | None:
    """Return the later call of ``match``; None where there is none.

    ``conditional``: the match ran under a condition.

    Raises:
        Refusal: it is not certain that it is made of the same tensor whenever it runs.
    """
    node = match.also
    if node is None:
        return None
    source, own = calls.source, calls.statement
    expression = calls.expression(node)
    if conditional:
        raise Refusal(f"line {own.lineno} runs under a condition of its own")
    if not isinstance(own, ast.Assign) or len(own.targets) != 1 or own.value is not calls.stays:
        raise Refusal(f"line {own.lineno} does not assign the sum to a name")
    target = own.targets[0]
    if not isinstance(target, ast.Name) or not isinstance(expression, ast.Call) or node.grad != match.last.grad:
        raise Refusal(f"line {own.lineno} does not assign the sum to a name")
    home, block = source.statement(expression), calls.block
    if home not in block or block.index(home) <= block.index(own) or not isinstance(home, _SIMPLE):
        raise Refusal(f"line {expression.lineno} does not always follow line {own.lineno}")
    above: ast.AST = expression
    while above is not home:
        above = source.file.parents[above]
        if isinstance(above, _UNDER):
            raise Refusal(f"line {expression.lineno} holds a condition, a lambda or a comprehension")
    read = expression.args[0] if expression.args else None
    if not isinstance(read, ast.Name) or read.id != target.id:
        raise Refusal(f"line {expression.lineno} normalises something else than {target.id}")
    _check_between(match, recording, block[block.index(own) + 1 : block.index(home)], target.id)
    name = f"normed_{target.id}"
    while name in source.file.identifiers:
        name += "_"
    return Second(expression, name, target)


def _check_between(match: Match, recording: Recording, statements: list[ast.stmt], name: str) -> None:
    """Raise Refusal where a statement between the calls binds ``name``, or a call changes what the later reads."""
    for statement in statements:
        stored = [part for part in walked(statement) if isinstance(part, ast.Name) and part.id == name]
        if any(not isinstance(part.ctx, ast.Load) for part in stored):
            raise Refusal(f"line {statement.lineno} binds {name} anew")
        if not isinstance(statement, _SIMPLE) and name in names_in(statement):
            raise Refusal(f"line {statement.lineno} uses {name} under a condition")
    assert match.also is not None
    storages = {value.storage for value in match.also.inputs}
    for node in recording.nodes[match.last.index + 1 : match.also.index]:
        if node.changed & storages:
            raise Refusal(f"{node.op} changes in place what {match.also.op} reads")
