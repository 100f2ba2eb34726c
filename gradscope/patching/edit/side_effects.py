"""What statements that go do besides making the pattern's tensors: nothing, or they cannot go."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torch import nn

from gradscope.patching.edit.call_sites import Texts
from gradscope.patching.edit.escapes import is_hooked, is_no_cast
from gradscope.patching.edit.reading import LOOKING, called_name
from gradscope.patching.edit.refusal import Refusal
from gradscope.patching.edit.syntax import bound_names, is_name, walked, within
from gradscope.patching.match import Match
from gradscope.recording.graph import Node

if TYPE_CHECKING:
    from gradscope.patching.edit.dead_code import Statements


def check_only_serves(statements: Statements, statement: ast.stmt) -> None:
    """Nothing but inner tensors comes out of a statement that goes.

    Raises:
        Refusal: something else does.
    """
    match, texts = statements.match, statements.texts
    if not bound_names(statement):
        raise Refusal(f"line {statement.lineno} assigns to more than a name")
    own = {(texts.expression(node), node.op) for node in match.nodes}
    for found, node in texts.calls_in(statement):
        if node in match.nodes:
            continue
        if (found, node.op) in own:  # in another round of a loop, which is a match of its own
            continue
        if node.changed or not node.outputs:
            raise Refusal(f"line {statement.lineno} also calls {node.op}")
        _check_feeds(statements, node, statement)


def _check_feeds(statements: Statements, node: Node, statement: ast.stmt) -> None:
    """A call beside the pattern, in a statement that goes, may only make what the pattern reads."""
    match, texts, source = statements.match, statements.texts, statements.source
    for value in node.outputs:
        for user in () if is_no_cast(value) else value.users:
            place = user.place_in(texts.frame)
            found = source.at(place.span) if place is not None else None
            goes = found is statements.stays or (
                found is not None and source.statement(found) in (*statements.parts, statement)
            )
            if user not in match.nodes and not goes:  # what goes may be another round's of the same loop
                raise Refusal(f"line {statement.lineno} also makes what {user.op} reads")


def check_calls(match: Match, texts: Texts, statements: Statements, spelled: list[ast.AST]) -> None:
    """What goes calls nothing but the match, and what only looks.

    Raises:
        Refusal: something else is called there, which may have an effect.
    """
    made = set(map(texts.expression, match.nodes)) | set(texts.recorded)
    for statement in [*statements.parts, statements.stays]:
        for part in walked(statement):
            if not isinstance(part, ast.Call) or part in made or any(within(each, part) for each in spelled):
                continue
            if called_name(part) in {"map", "zip"} and _maps(part, match):
                continue
            if _is_identity(texts.called_module(part)) or ast.unparse(part) == "super()":
                continue
            if called_name(part) not in LOOKING and not texts.makes_module(part):
                raise Refusal(f"line {part.lineno} also calls {called_name(part)}")


def _maps(call: ast.Call, match: Match) -> bool:
    """Whether it is ``map`` of a function that was looked at: a lambda, or one that made a part of the match."""
    if not isinstance(call.func, ast.Name) or call.func.id == "zip":
        return isinstance(call.func, ast.Name)
    first = call.args[0] if call.args else None
    name = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", None)
    helpers = {place.frame.code.co_name for node in match.nodes for place in node.places}
    return isinstance(first, ast.Lambda) or name in helpers


def hands_on(texts: Texts, statement: ast.stmt) -> bool:
    """Whether it is ``x = self.drop(x)`` where drop is the identity; or ``q, k = self.norm(q), self.norm(k)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        if len(target.elts) != len(value.elts):
            return False
        pairs = list(zip(target.elts, value.elts, strict=True))
    return all(isinstance(name, ast.Name) and _applies_identity(texts, call, name.id) for name, call in pairs)


def _applies_identity(texts: Texts, call: ast.expr, name: str) -> bool:
    if not isinstance(call, ast.Call) or call.keywords or not _is_identity(texts.called_module(call)):
        return False
    return len(call.args) == 1 and is_name(call.args[0], name)


def _is_identity(module: object) -> bool:
    """Whether a module hands on what it is given, and nobody watches it."""
    return type(module) is nn.Identity and not is_hooked(module)
