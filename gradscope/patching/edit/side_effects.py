"""Effects besides the match: tensors that escape or change, helpers with state or a choice, calls that would go."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from gradscope.ops import CASTS
from gradscope.patching.edit.bindings import is_given
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.callees import identity_guard
from gradscope.patching.edit.expressions import is_asked_for_form, number_of
from gradscope.patching.edit.source import FunctionSource, Refusal, SourceFile, SourceGuard
from gradscope.patching.edit.syntax import (
    INLINE,
    PURE,
    bound_names,
    called_name,
    calls_something,
    is_fixed,
    is_name,
    is_straight,
    names_in,
    reads_only,
    spelled_condition,
    walked,
    within,
)
from gradscope.patching.match.match import Match, Scalar
from gradscope.recording.graph import Frame, Node, Place, Recording, Value
from gradscope.recording.operations import LIKE


def check_run(match: Match, recording: Recording, frame: Frame, source: FunctionSource) -> None:
    """Raise Refusal where the recorded step shows that the calls of ``match`` cannot be replaced in ``frame``."""
    _check_escapes(match)
    _check_changes(match, recording.nodes)
    if len({node.grad for node in match.nodes if node.inputs}) > 1:
        raise Refusal("gradients are disabled for part of the pattern")
    files = {source.file.name: source.file}
    _check_helpers(match, frame, files)
    for scalar in match.fixed:
        _check_fixed(scalar, recording, files)


def _check_escapes(match: Match) -> None:
    """Raise Refusal where a call outside of ``match`` reads a tensor that it makes on the way, or that is kept."""
    stays = {value.content for node in match.nodes for value in node.inputs if value.producer not in match.nodes}
    stays.add(match.output.content)
    if match.given is not None:
        stays.add(match.given.value.content)
    for value in match.inner:
        others = [user for user in value.users if user not in match.nodes and not is_asked_for_form(user, value)]
        if others and others[0].op in LIKE:
            raise Refusal(f"{others[0].op} reads the shape of the result of {_maker(value.producer)}, which is removed")
        if others and not _is_no_cast(value):
            raise Refusal(f"the result of {_maker(value.producer)} is also read by {others[0].op}")
        if value.alive and value.content not in stays:
            raise Refusal(f"the result of {_maker(value.producer)} is returned or stored")


def _check_changes(match: Match, nodes: list[Node]) -> None:
    """Raise Refusal where an operand is changed in place before the result is made, or the match changes another's."""
    inner = {*match.inner, match.output}
    outside = {value.storage for node in match.nodes for value in node.inputs if value not in inner}
    changing = [node for node in nodes[: match.last.index + 1] if node.changed]
    for node in match.nodes:
        if node.changed & outside:
            raise Refusal(f"{node.op} modifies an existing tensor in place")
        for value in node.inputs:
            for other in changing:
                late = other.index > node.index and value.storage in other.changed
                if late and other not in match.nodes:
                    raise Refusal(f"{other.op} modifies in place a tensor that {node.op} read")


def _check_helpers(match: Match, frame: Frame, files: dict[str, SourceFile]) -> None:
    """Raise Refusal where a function called for ``match`` has a branch, hooks, or a decorator that replaces it.

    Of the two things that one choice leaves, the new code is for that which was done: see ``choice_guard``.
    """
    checked = set()
    for node in match.nodes:
        _check_hooks(node.caller)
        for place in node.places:
            code = place.frame.code
            if place.frame is frame:
                break
            _check_hooks(place.frame.owner)
            if code in checked or code.co_name in INLINE:
                continue
            checked.add(code)
            source = FunctionSource.of(code, files)
            definition = source.definition
            _check_identities(CallSites(source, place.frame, [], node))
            is_itself = getattr(place.frame.globals.get(code.co_name), "__code__", None) is code
            if not is_itself and any(
                not isinstance(each, ast.Name) or each.id != "staticmethod" for each in definition.decorator_list
            ):
                raise Refusal(f"{code.co_name}, which contains part of the pattern, is decorated")
            for statement in definition.body if choice_of(definition) is None else ():
                if not is_straight(statement):
                    raise Refusal(f"{code.co_name} may behave differently in another call, on line {statement.lineno}")


def _check_identities(calls: CallSites) -> None:
    """Raise Refusal where a helper calls an ``nn.Identity`` that may be another module next time."""
    for part in walked(calls.source.definition):
        if isinstance(part, ast.Call) and is_identity(calls.called_module(part)):
            guard = identity_guard(part, calls)
            if guard is not None:
                text = calls.source.file.of(guard.expression)
                raise Refusal(f"line {part.lineno}: {text} may contain different modules in another call")


def _check_hooks(module: object) -> None:
    if is_hooked(module):
        raise Refusal(f"the {type(module).__name__} has hooks, which would no longer be called")


def _check_fixed(scalar: Scalar, recording: Recording, files: dict[str, SourceFile]) -> None:
    """Raise Refusal unless ``scalar`` is spelled as a literal."""
    if scalar.node.caller is not None:  # a setting of a module of torch's
        return
    frame = scalar.node.places[0].frame
    source = FunctionSource.of(frame.code, files)
    found = number_of(scalar, CallSites(source, frame, recording.executed_in(frame), scalar.node))
    if not isinstance(found, str) and not is_fixed(found):
        raise Refusal(f"line {found.lineno}: the value of {source.file.of(found)} may change between calls")


def check_feeds_match(match: Match, calls: CallSites, parts: list[ast.stmt]) -> None:
    """Raise Refusal where one of the removed statements ``parts`` makes a tensor for anything but ``match``."""
    own = {(calls.expression(node), node.op) for node in match.nodes}
    for statement in parts:
        if not bound_names(statement):
            raise Refusal(f"line {statement.lineno} assigns to more than one plain name")
        for found, node in calls.calls_in(statement):
            # The same call in another round of a loop is part of a match of its own.
            if node in match.nodes or (found, node.op) in own:
                continue
            if node.changed or not node.outputs:
                raise Refusal(f"line {statement.lineno} also calls {node.op}")
            reader = _reader_that_stays(node, match, calls, parts)
            if reader is not None:
                raise Refusal(f"line {statement.lineno} also creates what {reader.op} reads")


def _reader_that_stays(node: Node, match: Match, calls: CallSites, parts: list[ast.stmt]) -> Node | None:
    """Return a call that reads an output of ``node`` and is neither of ``match`` nor in a removed statement."""
    for value in node.outputs:
        for user in () if _is_no_cast(value) else value.users:
            place = user.place_in(calls.frame)
            found = calls.source.at(place.span) if place is not None else None
            goes = found is calls.stays or (found is not None and calls.source.statement(found) in parts)
            if user not in match.nodes and not goes:  # what goes may be another round's of the same loop
                return user
    return None


def check_calls(match: Match, calls: CallSites, parts: list[ast.stmt], spelled: list[ast.AST]) -> list[SourceGuard]:
    """Return the conditions under which no removed statement calls anything with an effect, besides the match.

    Args:
        spelled: expressions that the new text evaluates.

    Raises:
        Refusal: one calls what may have an effect.
    """
    found: list[SourceGuard | None] = []
    made = set(map(calls.expression, match.nodes)) | calls.recorded
    for statement in [*parts, calls.stays]:
        for part in walked(statement):
            if not isinstance(part, ast.Call) or part in made or any(within(each, part) for each in spelled):
                continue
            if called_name(part) in {"map", "zip"} and _maps(part, match):
                continue
            if is_identity(calls.called_module(part)):
                found.append(identity_guard(part, calls))
                continue
            if ast.unparse(part) == "super()":
                continue
            if called_name(part) not in PURE and not calls.makes_module(part):
                raise Refusal(f"line {part.lineno} also calls {called_name(part)}")
    return [each for each in found if each is not None]


def _maps(call: ast.Call, match: Match) -> bool:
    """Return whether ``call`` is ``zip``, or ``map`` of a lambda or a helper that made a part of the match."""
    if not isinstance(call.func, ast.Name) or call.func.id == "zip":
        return isinstance(call.func, ast.Name)
    first = call.args[0] if call.args else None
    name = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", None)
    helpers = {place.frame.code.co_name for node in match.nodes for place in node.places}
    return isinstance(first, ast.Lambda) or name in helpers


def is_identity(module: object) -> bool:
    """Return whether ``module`` returns its argument, and no hook watches it."""
    return type(module) is nn.Identity and not is_hooked(module)


def is_hooked(module: object) -> bool:
    """Return whether ``module`` has a hook on its forward or backward."""
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_no_cast(value: Value) -> bool:
    """Return whether ``value`` is the input of the cast that returned it: it had that dtype already."""
    node = value.producer
    return node is not None and node.op in CASTS and value.content == node.inputs[0].content


def _maker(node: Node | None) -> str:
    return "an input" if node is None else node.op


# Helpers that do one of two things by what they are handed: ``x if mask is None else x + mask``.


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


def choice_guard(inner: Place, source: FunctionSource, call: ast.AST | None, calls: CallSites) -> SourceGuard | None:
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
    return _test_of_argument(choice, source.definition, call, calls, outcome=sides[0]) if sum(sides) == 1 else None


def unchanged_guard(statement: ast.stmt, calls: CallSites) -> SourceGuard | None:
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
    return _test_of_argument(choice, source.definition, call, calls, outcome=same[0])


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


def _test_of_argument(
    choice: HelperChoice, helper: ast.AST, call: ast.Call, calls: CallSites, *, outcome: bool
) -> SourceGuard | None:
    """Return the test of ``choice``, asked of the argument that it reads, before the helper is called."""
    (name,) = names_in(choice.test)
    given = (arguments_of(helper, call) or {}).get(name)
    if given is None or not reads_only(given) or not isinstance(given, (ast.Name, ast.Attribute, ast.Constant)):
        return None
    if is_fixed(given):
        return SourceGuard(given, "")
    text = calls.source.file.of(given)
    test = ast.parse(ast.unparse(_Renamed(name, text).visit(ast.parse(ast.unparse(choice.test), mode="eval")))).body[0]
    assert isinstance(test, ast.Expr)
    return SourceGuard(given, spelled_condition(ast.unparse(test.value), test.value, outcome))


class _Renamed(ast.NodeTransformer):
    """Puts the text of an argument in the place of the parameter."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.text, ast.Load()) if node.id == self.name else node
