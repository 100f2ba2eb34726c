"""What an expression reads, and whether reading it again gives the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import walked

# Reading these again gives the same, as long as the names in them are not bound anew.
LOOKING = frozenset(
    {"size", "dim", "sqrt", "float", "int", "len", "min", "max", "abs", "numel", "rsqrt", "pow", "finfo", "bool"}
    | {"tuple", "list", "isinstance", "Size"}
)

# Code of these stands inside the function around it.
INLINE = frozenset({"<lambda>", "<listcomp>", "<genexpr>"})


def parts_read(expression: ast.AST) -> Iterator[ast.expr]:
    """What an operation reads directly: operands, arguments, the object of a method."""
    if isinstance(expression, ast.BinOp):
        yield from (expression.left, expression.right)
    elif isinstance(expression, ast.UnaryOp):
        yield expression.operand
    elif isinstance(expression, ast.AugAssign):
        yield from (part for part in (_read(expression.target), expression.value) if part is not None)
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


def is_stored(name: ast.Name) -> bool:
    """Whether the name is bound there."""
    return isinstance(name.ctx, ast.Store)


def size_read(name: ast.Name, source: FunctionSource) -> int | None:
    """The dimension whose size is read of a tensor: ``x.size(-1)``, ``x.shape[-1]``."""
    parents = source.file.parents
    attribute = parents[name]
    if not isinstance(attribute, ast.Attribute):
        return None
    reader = parents[attribute]
    index: ast.expr | None = None
    if attribute.attr == "size" and isinstance(reader, ast.Call) and len(reader.args) == 1 and not reader.keywords:
        index = reader.args[0]
    elif attribute.attr == "shape" and isinstance(reader, ast.Subscript):
        index = reader.slice
    try:
        found = ast.literal_eval(index) if index is not None else None
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def _read(target: ast.expr) -> ast.expr | None:
    return target if isinstance(target, ast.Name) else None


def called_name(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "something")


def is_fixed(expression: ast.expr) -> bool:
    """Whether it is written as a number, and so the same every time."""
    if isinstance(expression, ast.UnaryOp):
        expression = expression.operand
    if isinstance(expression, ast.Call) and called_name(expression) == "float" and len(expression.args) == 1:
        expression = expression.args[0]
    return isinstance(expression, ast.Constant)


def name_chain(expression: ast.expr) -> Iterator[str]:
    """The names of ``a.b.c``, from the last."""
    while isinstance(expression, ast.Attribute):
        yield expression.attr
        expression = expression.value
    if isinstance(expression, ast.Name):
        yield expression.id


def reads_only(expression: ast.expr) -> bool:
    """Whether evaluating it changes nothing."""
    for part in walked(expression):
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
            if name not in LOOKING:
                return False
        elif isinstance(
            part, (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.ListComp, ast.GeneratorExp)
        ):
            return False
    return True
