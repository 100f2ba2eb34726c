"""A new call that gives two tensors: the one that stays, and another that the model reads as well.

A pair's other tensor is made on the way to the output (attention's weights); a second result is what a later call makes
of the output (the norm of a sum).
"""

from __future__ import annotations

import ast
from collections.abc import Set
from dataclasses import dataclass

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.syntax import names_in, reads_only, targets, walked
from gradscope.patching.graph import CASTS
from gradscope.patching.match import Match
from gradscope.recording.graph import Recording

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
_WITH_AUGMENTED = (*_SIMPLE, ast.AugAssign)
_UNDER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.NamedExpr)


class NoPair(Refusal):
    """The call cannot give two tensors; what a user is told is why it cannot give the output alone."""


@dataclass(frozen=True)
class Pair:
    """How the two results are called, and what reads the first of them."""

    output: str
    name: str
    target: ast.Name | None  # the name that is bound to the output alone already
    read: str  # what stands in the output's place, where there is no such name
    dtype: str  # the argument that says the dtype of the second; empty where it is the softmax's own


def pair_of(match: Match, calls: CallSites, parts: list[ast.stmt], spelled: set[str], taken: Set[str]) -> Pair | None:
    """Return the names of what ``match`` gives, where that is more than its output; else None.

    Args:
        parts: the statements that make the match's tensors.
        spelled: the names that the new call reads.
        taken: those that no new one may have.

    Raises:
        NoPair: the tensor beside the output has no name of its own, or the call cannot stand in an assignment.
    """
    if match.given is None:
        return None
    own, stays = calls.statement, calls.stays
    name = _name_of(match, calls, parts)
    cast = match.given.cast
    dtype = "" if cast is None else _dtype_of(calls.expression(cast), parts, spelled)
    if not isinstance(own, _SIMPLE) or not isinstance(stays, ast.expr):
        raise NoPair(f"line {own.lineno} is no assignment and no return")
    target = own.targets[0] if isinstance(own, ast.Assign) and len(own.targets) == 1 else None
    if name in targets(own):
        raise NoPair(f"line {own.lineno} binds {name} anew")
    if isinstance(target, ast.Name) and own.value is stays and not match.suffix:
        return Pair(target.id, name, target, target.id, dtype)
    file = calls.source.file
    if file.text[file.line_starts[own.lineno] : file.start(own)].strip():
        raise NoPair(f"line {own.lineno} holds several statements")
    for part in walked(own):
        if not isinstance(part, ast.expr) or file.end(part) > file.start(stays):
            continue
        if not isinstance(getattr(part, "ctx", None), ast.Store) and not reads_only(part):
            raise NoPair(f"line {own.lineno} evaluates something before the output")
    output = "attended"
    while output in file.identifiers | taken:
        output += "_"
    return Pair(output, name, None, f"{output}{match.suffix}", dtype)


def _name_of(match: Match, calls: CallSites, parts: list[ast.stmt]) -> str:
    """Return the name that holds the tensor when the output is made."""
    assert match.given is not None
    maker = match.given.value.producer
    assert maker is not None
    made = calls.expression(maker)
    parts = sorted(parts, key=calls.source.file.start)
    for place, part in enumerate(parts):
        if isinstance(part, ast.Assign) and part.value is made and len(part.targets) == 1:
            (target,) = part.targets
            if isinstance(target, ast.Name) and not any(target.id in targets(each) for each in parts[place + 1 :]):
                return target.id
    raise NoPair(f"the result of {maker.op} has no name of its own")


def _dtype_of(cast: ast.expr | ast.stmt, parts: list[ast.stmt], spelled: set[str]) -> str:
    """Return the argument for the dtype that a cast says: an operand's, or that of the scores and the result."""
    asked = [part.value for part in walked(cast) if isinstance(part, ast.Attribute) and part.attr == "dtype"]
    if isinstance(cast, ast.Call) and isinstance(cast.func, ast.Attribute) and cast.func.attr == "type_as":
        asked += cast.args
    name = asked[0].id if len(asked) == 1 and isinstance(asked[0], ast.Name) else ""
    if name in spelled:
        return f"weights_dtype={name}.dtype"
    makers = [part for part in parts if name in targets(part) and part.lineno < cast.lineno]
    if not makers or any(_casts(part) for maker in makers for part in walked(maker)):
        raise NoPair(f"line {cast.lineno} casts to a dtype that is not an operand's")
    return 'weights_dtype="result"'


def _casts(part: ast.AST) -> bool:
    """Check that a piece of source may change a dtype."""
    return isinstance(part, ast.Attribute) and part.attr in {*CASTS, "dtype"}


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
    if home not in block or block.index(home) <= block.index(own) or not isinstance(home, _WITH_AUGMENTED):
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
        if not isinstance(statement, _WITH_AUGMENTED) and name in names_in(statement):
            raise Refusal(f"line {statement.lineno} uses {name} under a condition")
    assert match.also is not None
    storages = {value.storage for value in match.also.inputs}
    for node in recording.nodes[match.last.index + 1 : match.also.index]:
        if node.changed & storages:
            raise Refusal(f"{node.op} changes in place what {match.also.op} reads")
