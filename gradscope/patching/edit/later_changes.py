"""Changes in place of what an attention gives: its backward reads the result, which that by hand does not.

What shows the result counts as well: kernels lay it out as [batch, tokens, heads, size], so that the ``reshape`` behind
a ``transpose`` is a view of it, where a product by hand was copied.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from inspect import isfunction, signature
from typing import TypeGuard

from torch import nn
from torch.nn import functional

from gradscope.ops import CASTS
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.callees import is_written
from gradscope.patching.edit.dead_code import LOOPS
from gradscope.patching.edit.source import Refusal
from gradscope.patching.edit.syntax import targets, walked, within
from gradscope.patching.match.graph import REPLAYABLE_VIEWS
from gradscope.patching.match.match import Match
from gradscope.recording.graph import Recording, Value

_READ_BACKWARD = frozenset({"attention", "packed_attention"})
# Without dropout, as in evaluation, it returns what it was given.
_SHOWING = (REPLAYABLE_VIEWS - {"clone", "repeat", "repeat_interleave"}) | CASTS | {"dropout"}
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
_PLACE_OF_INPLACE = {
    name: list(names).index("inplace")
    for name, each in vars(functional).items()
    if isfunction(each) and "inplace" in (names := signature(each).parameters)
}
# What gives the same memory, whatever autograd sees of it.
_SAME_MEMORY = frozenset({"data", "detach", "numpy", "T", "mT"})
# What goes over its arguments, of which each step is recorded under it.
_ITERATES = frozenset({"zip", "enumerate", "reversed", "iter", "map", "filter", "list", "tuple"})
_TAKES_IN = frozenset({"append", "extend", "insert", "add"})
_IN_PLACE = frozenset(
    {"__setitem__", "setitem"} | {f"__i{name}__" for name in _BINARY} | {f"i{name}" for name in _BINARY}
)
_NOT_CONTENT = frozenset({"requires_grad_", "share_memory_", "rename_"})
_DEEPEST = 24


def check_changed_later(match: Match, recording: Recording, calls: CallSites) -> None:
    """Raise Refusal where the recorded step changes the result of ``match`` in place, or its function may another time.

    On another path, as in ``if keep is not None: y[~keep] = 0``, the recorded step says nothing of it.
    """
    if match.recipe not in _READ_BACKWARD:
        return
    shown = {match.output}
    for node in recording.nodes[match.last.index + 1 :]:
        if node.changed & {value.storage for value in shown}:
            raise Refusal(f"{node.op} modifies the result in place, but attention's backward reads it")
        if node.op in _SHOWING and node.inputs and node.inputs[0] in shown:
            shown.update(node.outputs)
    shows = _Shows(calls, shown)
    for part in walked(calls.source.definition):
        changed = [*_changed(part), *_changed_by_module(part, calls), *_changed_by_helper(part, calls)]
        if any(shows.after(each) and any(shows.result(root) for root in _roots(each)) for each in changed):
            raise Refusal(f"line {changed[0].lineno} modifies the result in place, but attention's backward reads it")


def _changed(part: ast.AST) -> list[ast.expr]:
    """Return the expressions that ``part`` may change in place, by its form."""
    if isinstance(part, ast.AugAssign):
        return [part.target]
    if isinstance(part, (ast.Assign, ast.For)):
        targets = part.targets if isinstance(part, ast.Assign) else [part.target]
        return [each for target in targets for each in ast.walk(target) if _is_part_set(each)]
    if not isinstance(part, ast.Call):
        return []
    given = [each.value for each in part.keywords if each.arg == "out"]
    name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
    place = _PLACE_OF_INPLACE.get(name, len(part.args))
    settings = [*part.args[place : place + 1], *(each.value for each in part.keywords if each.arg == "inplace")]
    if any(ast.unparse(each) != "False" for each in settings):
        given += part.args[:1]
    by_name = name.endswith("_") and not name.endswith("__") and name not in _NOT_CONTENT
    if by_name or name in _IN_PLACE:
        given += [*part.args[:1], *([part.func.value] if isinstance(part.func, ast.Attribute) else [])]
    return given


def _changed_by_module(part: ast.AST, calls: CallSites) -> list[ast.expr]:
    """Return what a module of torch's is given that may be made to change it, as ``nn.ReLU(inplace)``."""
    module = calls.called_module(part) if isinstance(part, ast.Call) else None
    if not isinstance(part, ast.Call) or not isinstance(module, nn.Module) or not hasattr(module, "inplace"):
        return []
    return [] if is_written("inplace", part.func, module, calls) and not module.inplace else part.args[:1]


def _changed_by_helper(part: ast.AST, calls: CallSites) -> list[ast.expr]:
    """Return what a function of the file is given that it changes in place: ``def double(z): z *= 2``."""
    if not isinstance(part, ast.Call) or not isinstance(part.func, (ast.Name, ast.Attribute)):
        return []
    name = part.func.id if isinstance(part.func, ast.Name) else part.func.attr
    given: list[ast.expr] = []
    for each in calls.source.file.defined.get(name, ()):
        names = [argument.arg for argument in (*each.args.posonlyargs, *each.args.args)]
        if names[:1] == ["self"]:
            names = names[1:]
        changed = {root.id for inner in ast.walk(each) for one in _changed(inner) for root in _names(one)}
        given += [value for value, held in zip(part.args, names, strict=False) if held in changed]
        given += [keyword.value for keyword in part.keywords if keyword.arg in changed]
    return given


def _names(expression: ast.expr) -> list[ast.Name]:
    return [root for root in _roots(expression) if isinstance(root, ast.Name)]


def _is_part_set(target: ast.AST) -> TypeGuard[ast.Subscript]:
    """Return whether an assignment changes a part of something there, also in ``y[0], z = ...``."""
    return isinstance(target, ast.Subscript) and isinstance(target.ctx, ast.Store)


def _roots(expression: ast.expr) -> list[ast.expr]:
    """Return what a chain of methods, attributes and indices begins with, and the attributes on its way."""
    roots: list[ast.expr] = []
    while True:
        if isinstance(expression, ast.Attribute):
            roots.append(expression)
            expression = expression.value
        elif isinstance(expression, ast.Subscript):
            expression = expression.value
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
            expression = expression.func.value
        else:
            return [*roots, expression]


class _Shows:
    """Tells which expressions may show the result."""

    def __init__(self, calls: CallSites, shown: Set[Value]) -> None:
        self._calls, self._contents = calls, {value.content for value in shown}
        self._loops = calls.source.inside(calls.stays, LOOPS)

    def after(self, expression: ast.expr) -> bool:
        """Return whether it may be evaluated once the result is there."""
        file = self._calls.source.file
        behind = file.start(expression) >= file.end(self._calls.statement)
        return self._loops or behind or within(expression, self._calls.stays)

    def result(self, expression: ast.AST, depth: int = 0) -> bool:
        """Return whether ``expression`` is the result, shows it, or did in no recorded call and may."""
        if depth > _DEEPEST:
            return True
        if isinstance(expression, ast.Name):
            held = [*self._given(expression), *self._taken_in(expression)]
            return any(self.result(value, depth + 1) for value in held)
        shared = expression.func if isinstance(expression, ast.Call) else expression
        if isinstance(shared, ast.Attribute) and shared.attr in _SAME_MEMORY:
            return self.result(shared.value, depth + 1)
        if isinstance(expression, ast.Attribute):
            return any(self.result(value, depth + 1) for value in self._set_to(expression))
        goes_over = isinstance(shared, ast.Name) and shared.id in _ITERATES
        if isinstance(expression, ast.expr) and not goes_over:
            statement = self._calls.source.statement(expression)
            made = [node for part, node in self._calls.calls_in(statement) if part is expression]
            if made:
                return any(value.content in self._contents for value in made[-1].outputs)
        if isinstance(expression, (ast.Constant, ast.Compare, ast.Lambda)):
            return False
        return any(self.result(part, depth + 1) for part in ast.iter_child_nodes(expression) if _is_read(part))

    def _set_to(self, attribute: ast.Attribute) -> list[ast.expr]:
        """Return what the function sets an attribute to."""
        text = ast.unparse(attribute)
        return [
            part.value
            for part in walked(self._calls.source.definition)
            if isinstance(part, ast.Assign) and any(ast.unparse(target) == text for target in part.targets)
        ]

    def _taken_in(self, name: ast.Name) -> list[ast.expr]:
        """Return what a list or a set of that name takes in."""
        return [
            value
            for part in walked(self._calls.source.definition)
            if isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in _TAKES_IN
            and isinstance(part.func.value, ast.Name)
            and part.func.value.id == name.id
            for value in part.args
        ]

    def _given(self, name: ast.Name) -> list[ast.expr]:
        """Return what a name may hold: all that is bound to it since the last assignment that always runs before.

        One outside the loop that gives the result anew runs before the first round alone.
        """
        source, start = self._calls.source, self._calls.source.file.start
        stored = [each for each in source.names(name.id) if isinstance(each.ctx, ast.Store)]
        own = [each for each in stored if (scope := self._comprehension(each)) is not None and within(scope, name)]
        if own:
            return [value for each in own if (value := _value(each, self._calls)) is not None]
        homes = [each for each in stored if not isinstance(source.statement(each), ast.AugAssign)]
        above = [each for each in homes if self._end(each) <= start(name)]
        loop = self._loop_around(name)
        again = above if loop is None else [each for each in above if within(loop, each)]
        sure = [each for each in again if _runs_before(each, name, self._calls)]
        if sure:
            last = max(map(start, sure))
            homes = [each for each in above if start(each) >= last]
        elif not self._loops:
            homes = above
        return [value for each in homes if (value := _value(each, self._calls)) is not None]

    def _comprehension(self, stored: ast.Name) -> ast.AST | None:
        """Return the comprehension whose variable is bound there."""
        parents = self._calls.source.file.parents
        above: ast.AST = parents[stored]
        while not isinstance(above, (ast.stmt, ast.comprehension)):
            above = parents[above]
        return parents[above] if isinstance(above, ast.comprehension) else None

    def _loop_around(self, name: ast.Name) -> ast.AST | None:
        """Return the innermost loop that both the result and ``name`` stand in."""
        parents = self._calls.source.file.parents
        above: ast.AST = self._calls.stays
        while above is not self._calls.source.definition:
            if isinstance(above, LOOPS) and within(above, name):
                return above
            above = parents[above]
        return None

    def _end(self, stored: ast.Name) -> int:
        """Return where a name is bound from: the end of its assignment, or in a loop of its target."""
        home = self._calls.source.statement(stored)
        return self._calls.source.file.end(stored if isinstance(home, LOOPS) else home)


def _runs_before(stored: ast.Name, read: ast.Name, calls: CallSites) -> bool:
    """Return whether an assignment runs whenever a name below it is read."""
    home = calls.source.statement(stored)
    block = calls.source.block(home)
    return targets(home) != set() and any(within(each, read) for each in block[block.index(home) + 1 :])


def _value(stored: ast.Name, calls: CallSites) -> ast.expr | None:
    """Return what is bound to a name: by an assignment, inside an expression, or by a loop."""
    above = calls.source.file.parents[stored]
    while not isinstance(above, (ast.stmt, ast.NamedExpr, ast.comprehension)):
        above = calls.source.file.parents[above]
    return getattr(above, "value", getattr(above, "iter", None))


def _is_read(part: ast.AST) -> bool:
    return isinstance(part, (ast.expr, ast.keyword, ast.comprehension))
