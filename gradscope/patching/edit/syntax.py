"""Questions about a piece of a syntax tree that the piece alone answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import TypeGuard

# What tells of a tensor without reading its numbers.
SHAPE_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})
SHAPE_METHODS = frozenset({"size", "dim", "numel"})

# Around these, what a recorded run did says too little about the next.
HIDES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
BRANCHES = (ast.IfExp, ast.BoolOp)

# Functions and methods without effects, which give the same for the same arguments.
PURE = frozenset(
    {"size", "dim", "sqrt", "float", "int", "len", "min", "max", "abs", "numel", "rsqrt", "pow", "finfo", "bool"}
    | {"tuple", "list", "isinstance", "Size", "sum", "any", "all"}
)

# Names of code objects whose source stands inside the function around them.
INLINE = frozenset({"<lambda>", "<listcomp>", "<genexpr>"})

_OPPOSITE = {ast.Is: "is not", ast.IsNot: "is", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in"}


def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return ``node`` and all nodes inside it, in the order of ``ast.walk``; kept, for a parsed tree is not changed."""
    found: tuple[ast.AST, ...] | None = getattr(node, "_walked", None)
    if found is None:
        found = tuple(ast.walk(node))
        node._walked = found  # type: ignore[attr-defined]
    return found


def is_name(node: ast.AST, name: str) -> bool:
    """Return whether ``node`` is the name ``name``."""
    return isinstance(node, ast.Name) and node.id == name


def within(outer: ast.AST, inner: ast.AST) -> bool:
    """Return whether ``inner`` is ``outer`` or a part of it."""
    inside: frozenset[int] | None = getattr(outer, "_inside", None)
    if inside is None:
        inside = frozenset(map(id, walked(outer)))
        outer._inside = inside  # type: ignore[attr-defined]
    return id(inner) in inside


def names_in(node: ast.AST) -> set[str]:
    """Return the names that occur in ``node``."""
    return {part.id for part in walked(node) if isinstance(part, ast.Name)}


def statements_in(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return ``statements`` and all statements inside them."""
    return [part for statement in statements for part in walked(statement) if isinstance(part, ast.stmt)]


def targets(statement: ast.AST) -> set[str]:
    """Return the names that an assignment binds; none where it binds anything else too."""
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
    """Return the names whose tensors ``statement`` makes or changes in place."""
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
    """Return whether ``statement`` binds names or returns, without a condition."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if not isinstance(statement, (ast.Return, ast.Assert, ast.Pass)) and not targets(statement):
        return False
    hidden = [part for part in walked(statement) if isinstance(part, (*HIDES, *BRANCHES))]
    return all(is_the_same_for_each(part) for part in hidden)


def is_the_same_for_each(part: ast.AST) -> bool:
    """Return whether ``part`` is a lambda or comprehension that has no condition inside and binds no name for later."""
    if isinstance(part, (ast.ListComp, ast.GeneratorExp)):
        if len(part.generators) != 1 or part.generators[0].ifs or part.generators[0].is_async:
            return False
    elif not isinstance(part, ast.Lambda):
        return False
    return not any(isinstance(each, (*HIDES, *BRANCHES)) for each in walked(part) if each is not part)


def only_checks(statement: ast.stmt) -> bool:
    """Return whether ``statement`` is an ``assert``, or an ``if`` that only raises: recipes check their arguments."""
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(part, ast.Raise) for part in statement.body)
    return isinstance(statement, ast.Assert)


def calls_something(statement: ast.stmt) -> bool:
    """Return whether ``statement`` holds an operator or a call, which would have been recorded."""
    return any(isinstance(part, (ast.Call, ast.BinOp, ast.AugAssign)) for part in walked(statement))


def spelled_condition(text: str, test: ast.expr, outcome: bool) -> str:
    """Return the source of a condition that ``test``, written ``text``, has this outcome; to stand in an ``and``."""
    simple = isinstance(test, (ast.Name, ast.Attribute, ast.Compare, ast.Call, ast.UnaryOp, ast.Subscript))
    if outcome:
        return text if simple else f"({text})"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text.removeprefix("not").strip()
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITE:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        return f"{left} {_OPPOSITE[type(test.ops[0])]} {right}"
    return f"not {text}" if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"not ({text})"


def parts_read(expression: ast.AST) -> Iterator[ast.expr]:
    """Yield what an operation reads directly: operands, arguments, the object of a method."""
    if isinstance(expression, ast.BinOp):
        yield from (expression.left, expression.right)
    elif isinstance(expression, ast.UnaryOp):
        yield expression.operand
    elif isinstance(expression, ast.AugAssign):
        yield from (part for part in (_name(expression.target), expression.value) if part is not None)
    elif isinstance(expression, (ast.Subscript, ast.Attribute)):
        yield expression.value
        if isinstance(expression, ast.Subscript):
            yield expression.slice
            yield from expression.slice.elts if isinstance(expression.slice, ast.Tuple) else ()
    elif isinstance(expression, ast.Compare):
        yield from (expression.left, *expression.comparators)
    elif isinstance(expression, ast.Call):
        if isinstance(expression.func, ast.Attribute):
            yield expression.func.value
        for argument in (*expression.args, *(keyword.value for keyword in expression.keywords)):
            if isinstance(argument, (ast.List, ast.Tuple)):
                yield from argument.elts
            yield argument


def _name(target: ast.expr) -> ast.expr | None:
    return target if isinstance(target, ast.Name) else None


def called_name(call: ast.Call) -> str:
    """Return the name of the function or method that ``call`` calls."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "something")


def is_fixed(expression: ast.expr) -> bool:
    """Return whether ``expression`` is a literal."""
    if isinstance(expression, ast.UnaryOp):
        expression = expression.operand
    if isinstance(expression, ast.Call) and called_name(expression) == "float" and len(expression.args) == 1:
        expression = expression.args[0]
    return isinstance(expression, ast.Constant)


def name_chain(expression: ast.expr) -> Iterator[str]:
    """Yield the names of ``a.b.c``, from the last."""
    while isinstance(expression, ast.Attribute):
        yield expression.attr
        expression = expression.value
    if isinstance(expression, ast.Name):
        yield expression.id


def reads_only(expression: ast.expr) -> bool:
    """Return whether evaluating ``expression`` has no effect."""
    for part in walked(expression):
        if isinstance(part, ast.Call):
            if called_name(part) not in PURE:
                return False
        elif isinstance(
            part, (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.ListComp, ast.GeneratorExp)
        ):
            return False
    return True


def private(name: str, code: CodeType) -> str:
    """Return the attribute that ``name`` stands for in ``code``: ``__name`` in a class holds the class's name."""
    home = code.co_qualname.split(".")[-2:-1]
    if not home or home == ["<locals>"] or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{home[0].lstrip('_')}{name}"
