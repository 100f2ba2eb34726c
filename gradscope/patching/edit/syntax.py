"""Small questions about pieces of source."""

from __future__ import annotations

import ast
from types import CodeType
from typing import TypeGuard

# Around these, what a recorded run did says too little about the next.
HIDES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
BRANCHES = (ast.IfExp, ast.BoolOp)

_OPPOSITE = {ast.Is: "is not", ast.IsNot: "is", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in"}


def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """``node`` and all inside it, as ``ast.walk`` gives them; kept, for trees that were read are not changed."""
    found: tuple[ast.AST, ...] | None = getattr(node, "_walked", None)
    if found is None:
        found = tuple(ast.walk(node))
        node._walked = found  # type: ignore[attr-defined]
    return found


def is_name(node: ast.AST, name: str) -> bool:
    """Whether it is that name."""
    return isinstance(node, ast.Name) and node.id == name


def within(outer: ast.AST, inner: ast.AST) -> bool:
    """Whether ``inner`` is ``outer`` or a part of it."""
    inside: frozenset[int] | None = getattr(outer, "_inside", None)
    if inside is None:
        inside = frozenset(map(id, walked(outer)))
        outer._inside = inside  # type: ignore[attr-defined]
    return id(inner) in inside


def names_in(node: ast.AST) -> set[str]:
    """The names that occur in it."""
    return {part.id for part in walked(node) if isinstance(part, ast.Name)}


def statements_in(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements and all inside them."""
    return [part for statement in statements for part in walked(statement) if isinstance(part, ast.stmt)]


def targets(statement: ast.AST) -> set[str]:
    """The names that an assignment binds; none where it binds anything else."""
    if isinstance(statement, ast.Assign):
        given = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        given = [statement.target]
    else:
        return set()
    found: set[str] = set()
    for target in given:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return set()
        found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found


def bound_names(statement: ast.stmt) -> set[str]:
    """The names whose tensors a statement makes or, in place, changes."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        while _is_in_place(function) and isinstance(function.value, ast.Call):  # x.mul_(2).add_(y)
            if not _is_in_place(function.value.func):
                break
            function = function.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return {function.value.id}
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            return {target.value.id}
    return targets(statement)


def _is_in_place(function: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(function, ast.Attribute) and function.attr.endswith("_")


def is_straight(statement: ast.stmt) -> bool:
    """Whether it binds names or returns, without a condition."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if not isinstance(statement, (ast.Return, ast.Assert, ast.Pass)) and not targets(statement):
        return False
    hidden = [part for part in walked(statement) if isinstance(part, (*HIDES, *BRANCHES))]
    return all(is_the_same_for_each(part) for part in hidden)


def is_the_same_for_each(part: ast.AST) -> bool:
    """Whether a lambda or a comprehension does one thing to all it is given: no condition, no name bound for later."""
    if isinstance(part, (ast.ListComp, ast.GeneratorExp)):
        if len(part.generators) != 1 or part.generators[0].ifs or part.generators[0].is_async:
            return False
    elif not isinstance(part, ast.Lambda):
        return False
    return not any(isinstance(each, (*HIDES, *BRANCHES)) for each in walked(part) if each is not part)


def only_checks(statement: ast.stmt) -> bool:
    """``assert`` of a form, or ``if`` with nothing but a ``raise``: the recipe checks its arguments itself."""
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(part, ast.Raise) for part in statement.body)
    return isinstance(statement, ast.Assert)


def calls_something(statement: ast.stmt) -> bool:
    """Whether running it would have been recorded, as far as the text tells."""
    return any(isinstance(part, (ast.Call, ast.BinOp, ast.AugAssign)) for part in walked(statement))


def spelled_condition(text: str, test: ast.expr, outcome: bool) -> str:
    """The condition, or its opposite, to stand beside others in an ``and``."""
    simple = isinstance(test, (ast.Name, ast.Attribute, ast.Compare, ast.Call, ast.UnaryOp, ast.Subscript))
    if outcome:
        return text if simple else f"({text})"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text.removeprefix("not").strip()
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITE:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        return f"{left} {_OPPOSITE[type(test.ops[0])]} {right}"
    return f"not {text}" if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"not ({text})"


def private(name: str, code: CodeType) -> str:
    """What Python makes of a ``__name`` in a class: one that holds the class's; any other as it is."""
    home = code.co_qualname.split(".")[-2:-1]
    if not home or home == ["<locals>"] or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{home[0].lstrip('_')}{name}"
