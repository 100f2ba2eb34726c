"""Helpers that do one of two things by what they are handed: ``x if mask is None else x + mask``."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import FunctionType

from gradscope.patching.edit.bindings import is_given
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.replacement import Known
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import (
    calls_something,
    is_fixed,
    is_name,
    is_straight,
    names_in,
    reads_only,
    spelled_condition,
    within,
)
from gradscope.recording.graph import Place


@dataclass(frozen=True)
class HelperChoice:
    """What a helper returns under a condition, and otherwise."""

    test: ast.expr
    yes: ast.expr
    no: ast.expr


def choice_of(definition: ast.AST) -> HelperChoice | None:
    """Return the conditional expression, or the ``if``, that is all that a helper consists of; None of any other."""
    if not isinstance(definition, ast.FunctionDef):
        return None
    body = [each for each in definition.body if not isinstance(each, ast.Expr) or calls_something(each)]
    last = body[-1] if body else None
    if not isinstance(last, ast.Return) or last.value is None or len(body) > 2:
        return None
    found = None
    if len(body) == 1 and isinstance(last.value, ast.IfExp):
        found = HelperChoice(last.value.test, last.value.body, last.value.orelse)
    elif len(body) == 2 and isinstance(body[0], ast.If) and not body[0].orelse and len(body[0].body) == 1:
        given = _given_by(body[0].body[0], last.value)
        found = HelperChoice(body[0].test, given, last.value) if given is not None else None
    if found is None or not reads_only(found.test) or len(names_in(found.test)) != 1:
        return None
    return found if all(is_straight(ast.Return(side)) for side in (found.yes, found.no)) else None


def _given_by(statement: ast.stmt, result: ast.expr) -> ast.expr | None:
    """Return what ``statement`` returns, or gives the name ``result`` that is returned then."""
    if isinstance(statement, ast.Return):
        return statement.value
    if not isinstance(statement, ast.Assign) or not isinstance(result, ast.Name):
        return None
    return statement.value if [result.id] == [getattr(each, "id", None) for each in statement.targets] else None


def side_taken(inner: Place, source: FunctionSource, call: ast.AST | None, calls: CallSites) -> Known | None:
    """Return the condition under which a helper made a recorded call; None where it has no choice, or none is known.

    Args:
        inner: where the call was made in the helper, whose source is ``source``.
        call: what stands where the helper was called, in the function of ``calls``.
    """
    choice = choice_of(source.definition)
    made = source.at(inner.span)
    if choice is None or made is None or not isinstance(call, ast.Call):
        return None
    if getattr(_function(call, calls), "__code__", None) is not inner.frame.code:  # a method has one argument more
        return None
    sides = [within(side, made) for side in (choice.yes, choice.no)]
    return _asked(choice, source.definition, call, calls, outcome=sides[0]) if sum(sides) == 1 else None


def returned_as_it_was(statement: ast.stmt, calls: CallSites) -> Known | None:
    """Return the condition under which ``x = maybe_add(x, mask)`` leaves ``x`` as it is; None of any other statement.

    What the helper does otherwise would have been recorded.
    """
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or calls.calls_in(statement):
        return None
    target, call = statement.targets[0], statement.value
    held = _function(call, calls)
    if held is None or not isinstance(call, ast.Call):
        return None
    source = FunctionSource.of(held.__code__, {calls.source.file.name: calls.source.file})
    choice, given = choice_of(source.definition), arguments_of(source.definition, call)
    if choice is None or given is None or not isinstance(target, ast.Name):
        return None
    same = [isinstance(side, ast.Name) and is_name(given.get(side.id, side), target.id) for side in _sides(choice)]
    if sum(same) != 1 or not calls_something(ast.Return(_sides(choice)[int(same[0])])):
        return None
    return _asked(choice, source.definition, call, calls, outcome=same[0])


def _function(call: ast.AST, calls: CallSites) -> FunctionType | None:
    """Return the function that ``call`` always calls, by its own name, one of the file's; None of any other call."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    name, code = call.func.id, calls.frame.code
    held = calls.frame.globals.get(name)
    if name in {*code.co_varnames, *code.co_cellvars, *code.co_freevars} or not isinstance(held, FunctionType):
        return None
    return held if held.__name__ == name and not is_given(name, name, calls.source.file) else None


def arguments_of(definition: ast.AST, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return what ``call`` hands to each parameter that it names; None where that cannot be told from the source."""
    if not isinstance(definition, ast.FunctionDef) or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if any(each.arg is None for each in call.keywords):
        return None
    args = definition.args
    parameters = [
        *(inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_ONLY) for each in args.posonlyargs),
        *(inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in args.args),
        *(inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY) for each in args.kwonlyargs),
    ]
    try:
        named = {each.arg: each.value for each in call.keywords if each.arg is not None}
        return dict(inspect.Signature(parameters).bind_partial(*call.args, **named).arguments)
    except TypeError:
        return None


def _sides(choice: HelperChoice) -> tuple[ast.expr, ast.expr]:
    return choice.yes, choice.no


def _asked(choice: HelperChoice, helper: ast.AST, call: ast.Call, calls: CallSites, *, outcome: bool) -> Known | None:
    """Return the test of ``choice``, asked of the argument that it reads, before the helper is called."""
    (name,) = names_in(choice.test)
    given = (arguments_of(helper, call) or {}).get(name)
    if given is None or not reads_only(given) or not isinstance(given, (ast.Name, ast.Attribute, ast.Constant)):
        return None
    if is_fixed(given):
        return Known(given, "")
    text = calls.source.file.of(given)
    test = ast.parse(ast.unparse(_Renamed(name, text).visit(ast.parse(ast.unparse(choice.test), mode="eval")))).body[0]
    assert isinstance(test, ast.Expr)
    return Known(given, spelled_condition(ast.unparse(test.value), test.value, outcome))


class _Renamed(ast.NodeTransformer):
    """Puts the text of an argument in the place of the parameter."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.text, ast.Load()) if node.id == self.name else node
