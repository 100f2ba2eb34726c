"""Numbers that are the same in every call: written down, of a tensor's form, or made of such."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Collection
from types import ModuleType

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.expressions import size_read
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import SHAPE_ATTRIBUTES, SHAPE_METHODS, called_name, is_name
from gradscope.patching.match.graph import uncast
from gradscope.recording.graph import Frame, Node, Value


def resolved(expression: ast.expr, source: FunctionSource) -> ast.expr:
    """Return what a name that is bound once is bound to; any other expression as it is."""
    for _ in range(8):
        if not isinstance(expression, ast.Name):
            break
        homes = source.assignments(expression)
        if len(homes) != 1 or len(homes[0].targets) != 1 or not isinstance(homes[0].targets[0], ast.Name):
            break
        expression = homes[0].value
    return expression


def is_certain(expression: ast.AST, calls: CallSites, depth: int = 0) -> bool:
    """Return whether it is written down, or made of a tensor's shape and constants of modules, as ``math.pi``."""
    if depth > _DEEPEST:  # n = n + 1
        return False
    expression = resolved(expression, calls.source) if isinstance(expression, ast.expr) else expression
    parts: list[ast.expr] = []
    certain = isinstance(expression, (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Slice))
    if isinstance(expression, ast.JoinedStr):
        return all(isinstance(part, ast.Constant) for part in expression.values)
    if isinstance(expression, ast.Name):
        if _is_of_math(expression, calls):
            return True
        values = [home.value for home in calls.source.assignments(expression)]
        values = [value for value in values if not _hands_on(value, expression.id)]
        return bool(values) and all(is_certain(value, calls, depth + 1) for value in values)
    if isinstance(expression, ast.Attribute):
        certain = _is_form(expression, SHAPE_ATTRIBUTES, calls) or _of_module(expression, calls)
        if not certain and isinstance(expression.value, ast.Call):  # finfo(...).min
            certain, parts = True, [expression.value]
    elif isinstance(expression, ast.Subscript):
        certain, parts = True, [expression.value, expression.slice]
    elif isinstance(expression, ast.Call):
        function = expression.func
        certain = isinstance(function, ast.Name) and _is_pure(function, calls.frame)
        if isinstance(function, ast.Attribute):
            pure = function.attr in _OF_NUMBERS and _of_module(function, calls)
            certain = pure or _is_form(function, SHAPE_METHODS, calls)
        parts = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    elif certain:
        parts = [part for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr)]
    return certain and all(is_certain(part, calls, depth + 1) for part in parts)


def is_of_other_sizes(
    expression: ast.expr, at: Node, features: Collection[Value], calls: CallSites, depth: int = 0
) -> bool:
    """Return whether a certain number is made of another size than the last one of ``features``: equal by chance, then.

    Of that one it is the size itself or a root of it: a part of it is a number of this one width.
    """
    if depth > _DEEPEST:
        return True
    expression = resolved(expression, calls.source)
    if isinstance(expression, ast.Name) and not calls.is_tensor(expression):
        homes = [each for each in calls.source.assignments(expression) if not _hands_on(each.value, expression.id)]
        return any(
            not _unpacks_last(home, expression.id, at, features, calls)
            and is_of_other_sizes(home.value, at, features, calls, depth + 1)
            for home in homes
        )
    asked = expression.func if isinstance(expression, ast.Call) else expression
    asked = asked.value if isinstance(asked, ast.Subscript) else asked
    sizes = {"shape", "ndim", *SHAPE_METHODS}
    if isinstance(asked, ast.Attribute) and asked.attr in sizes and calls.is_tensor(asked.value):
        is_last = isinstance(asked.value, ast.Name) and size_read(asked.value, calls.source) == -1
        return not (is_last and _is_one_of(asked.value, at, features, calls))
    if calls.is_tensor(expression):  # whose dtype is asked for
        return False
    parts = [part for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr)]
    features = features if _is_power(expression) else ()
    return any(is_of_other_sizes(part, at, features, calls, depth + 1) for part in parts)


def _is_power(expression: ast.expr) -> bool:
    """Return whether it is a root, a power or the reciprocal of a number."""
    if isinstance(expression, ast.Call):
        return called_name(expression) in {"sqrt", "rsqrt", "float", "int"}
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return isinstance(expression.left, ast.Constant)
    return isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Pow)


def is_half_of_last(expression: ast.expr, at: Node, calls: CallSites) -> bool:
    """Return whether it is ``x.shape[-1] // 2``, where ``at`` reads ``x``."""
    if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, ast.FloorDiv):
        return False
    if ast.unparse(expression.right) != "2":
        return False
    reads = any(calls.is_tensor(part) for part in ast.walk(expression.left) if isinstance(part, ast.expr))
    reads = reads or isinstance(expression.left, ast.Name)
    return reads and not is_of_other_sizes(expression.left, at, at.inputs[:1], calls)


def _unpacks_last(home: ast.Assign, name: str, at: Node, features: Collection[Value], calls: CallSites) -> bool:
    """Return whether it is the last one of ``B, T, C = x.shape``, which fits tensors of so many dimensions alone."""
    read = home.value.func if isinstance(home.value, ast.Call) else home.value
    return (
        isinstance(read, ast.Attribute)
        and read.attr in {"shape", "size"}
        and _is_one_of(read.value, at, features, calls)
        and all(isinstance(each, ast.Tuple) and is_name(each.elts[-1], name) for each in home.targets)
    )


def _is_one_of(expression: ast.expr, at: Node, features: Collection[Value], calls: CallSites) -> bool:
    place = at.place_in(calls.frame)
    held = place.names.get(expression.id) if isinstance(expression, ast.Name) and place is not None else None
    return held is not None and uncast(held).content in {uncast(each).content for each in features}


def _hands_on(value: ast.expr, name: str) -> bool:
    """Return whether it makes a tensor of the number that ``name`` was: ``fill = torch.full([], fill)``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr == "to":
        return _hands_on(value.func.value, name)
    return value.func.attr in {"tensor", "as_tensor", "full"} and any(is_name(each, name) for each in value.args)


def _is_pure(name: ast.Name, frame: Frame) -> bool:
    """Return whether a function called by name gives the same number for the same ones, as ``float`` and ``sqrt``.

    A function of ``math`` is known by any name that the file has for it.
    """
    if name.id in frame.code.co_varnames or name.id in frame.code.co_freevars:
        return False
    held = frame.globals.get(name.id, getattr(builtins, name.id, None))
    return any(held is each for each in _PURE)


_PURE = (float, int, abs, min, max, len, round, *(each for each in vars(math).values() if callable(each)))
# Of modules; what draws random numbers, or tells of the machine, is not among them.
_OF_NUMBERS = frozenset({name for name, each in vars(math).items() if callable(each)}) | {
    *("finfo", "iinfo", "tensor", "as_tensor", "scalar_tensor", "full", "float32", "float64", "float16", "bfloat16"),
    *("rsqrt", "square", "arctan", "arctan2", "abs", "absolute", "power", "sign", "reciprocal", "zeros", "ones"),
    *("int8", "int16", "int32", "int64", "array", "asarray", "round", "maximum", "minimum", "arange", "Size"),
}
_DEEPEST = 24


def _of_module(expression: ast.expr, calls: CallSites) -> bool:
    """Return whether ``expression`` is an attribute of a library's module: ``math.sqrt``, ``torch.pi``."""
    root = expression
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id in calls.frame.code.co_varnames:
        return False
    held = calls.frame.globals.get(root.id)
    return isinstance(held, ModuleType) and held.__name__.partition(".")[0] in {"math", "torch", "numpy", "cmath"}


def _is_of_math(name: ast.Name, calls: CallSites) -> bool:
    """Return whether the file has ``name`` from ``math`` and from nowhere else, as ``pi``."""
    file = calls.source.file
    imports = (node for node in file.tree.body if isinstance(node, ast.ImportFrom) and node.module == "math")
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return name.id in names and file.bound[name.id] == 1


def _is_form(expression: ast.Attribute, names: frozenset[str], calls: CallSites) -> bool:
    """Return whether it asks a tensor for its shape: ``self.size`` and ``self.ndim`` are the user's own."""
    return expression.attr in names and calls.is_tensor(expression.value)
