"""How a tensor or a number of the recording is spelled in the source, and whether that spelling still holds later."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from torch import nn

from gradscope.patching.match import Scalar
from gradscope.patching.record import Frame, Node, Value
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource

# Reading these again gives the same, as long as the names in them are not bound anew.
_LOOKING_CALLS = frozenset({"size", "dim", "sqrt", "float", "int", "len", "min", "max", "abs", "numel", "rsqrt", "pow"})

_REFLECTED = frozenset({"__rmul__", "__radd__", "__rsub__", "__rtruediv__", "__rdiv__", "__rmatmul__", "__rpow__"})


class Texts:
    """Spellings inside one frame, as of the call ``last``."""

    def __init__(self, source: FunctionSource, frame: Frame, nodes: list[Node], last: Node) -> None:
        self.source, self.frame, self.last = source, frame, last
        self._made: dict[ast.AST, Node] = {}  # the last call that an expression made is its value
        for node in nodes:
            place = node.place_in(frame)
            expression = source.at(place.span) if place is not None else None
            if expression is not None:
                self._made[expression] = node

    def expression(self, node: Node) -> ast.expr | ast.stmt:
        """Where a call stands."""
        place = node.place_in(self.frame)
        found = self.source.at(place.span) if place is not None else None
        if found is None:
            raise Refusal(f"{node.op} stands in no expression of {self.frame.code.co_name}")
        return found

    def denotes(self, expression: ast.AST, value: Value, at: Node) -> bool:
        """Whether an expression read by the call ``at`` is the tensor ``value``."""
        if isinstance(expression, ast.Name):
            place = at.place_in(self.frame)
            held = place.names.get(expression.id) if place is not None else None
            return held is not None and held.content == value.content
        if isinstance(expression, ast.Attribute) and expression not in self._made:
            return value.alive and self._attribute(expression) is value.tensor()
        made = self._made.get(expression)
        return made is not None and any(output.content == value.content for output in made.outputs)

    def operand(self, value: Value, users: frozenset[Node]) -> tuple[ast.expr, Node]:
        """An expression for ``value`` in one of the calls ``users``, and that call; names come before calls."""
        found: list[tuple[ast.expr, Node]] = []
        for user in sorted(users, key=lambda node: node.index):
            if value in user.inputs:
                found += [(part, user) for part in _parts(self.expression(user)) if self.denotes(part, value, user)]
        if not found:
            raise Refusal(f"no expression in {self.frame.code.co_name} is the tensor that {_user(value, users)} reads")
        return min(found, key=lambda pair: not isinstance(pair[0], ast.Name))

    def scalar(self, scalar: Scalar) -> ast.expr | str:
        """The expression of a number."""
        node, expression = scalar.node, self.expression(scalar.node)
        if isinstance(expression, ast.AugAssign) and scalar.position == 1:
            return expression.value
        if isinstance(expression, ast.BinOp):
            right = (scalar.position == 1) != (getattr(node.function, "__name__", "") in _REFLECTED)
            return expression.right if right else expression.left
        if isinstance(expression, ast.Call):
            found = self._argument(expression, node, scalar)
            if found is not None:
                return found
            if scalar.otherwise:
                return scalar.otherwise
        raise Refusal(f"how {node.op} spells its {scalar.name or 'number'} is not understood")

    def module(self, node: Node) -> ast.expr | None:
        """The expression of the module that made the call: ``self.drop`` in ``self.drop(x)``."""
        expression = self.expression(node)
        if isinstance(expression, ast.Call) and self.called_module(expression) is not None:
            return expression.func
        return None

    def called_module(self, call: ast.Call) -> object:
        """The module that an expression calls, where it is an attribute of the frame's own module."""
        found = self._attribute(call.func)
        return found if isinstance(found, nn.Module) else None

    def _attribute(self, expression: ast.expr) -> object:
        """What ``self.a.b[0]`` is now; None where it is no such chain."""
        first = self.frame.code.co_varnames[:1]
        if isinstance(expression, ast.Name):
            return self.frame.owner if first == (expression.id,) else None
        if isinstance(expression, ast.Attribute):
            under = self._attribute(expression.value)
            return None if under is None else getattr(under, expression.attr, None)
        if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            under = self._attribute(expression.value)
            try:
                return None if under is None else under[expression.slice.value]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return None

    def _argument(self, call: ast.Call, node: Node, scalar: Scalar) -> ast.expr | None:
        """The argument of a call by its name, or by its position where the call is a function's or a method's."""
        for keyword in call.keywords:
            if keyword.arg is None:
                raise Refusal(f"{node.op} is called with **")
            if scalar.name and keyword.arg == scalar.name:
                return keyword.value
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            raise Refusal(f"{node.op} is called with *")
        if self.called_module(call) is not None:
            return None if scalar.name else (call.args[scalar.position] if scalar.position < len(call.args) else None)
        position = scalar.position
        if scalar.name:
            try:
                names = list(inspect.signature(node.function).parameters)
            except (TypeError, ValueError):  # a builtin: its arguments come as they were written
                names = []
            position = names.index(scalar.name) if scalar.name in names else position
        index = position - 1 if self._is_method(call.func) else position
        return call.args[index] if 0 <= index < len(call.args) else None

    def _is_method(self, function: ast.expr) -> bool:
        """Whether it is ``x.f`` of a tensor and not ``torch.f`` of a module."""
        if not isinstance(function, ast.Attribute):
            return False
        root: ast.expr = function.value
        while isinstance(root, ast.Attribute):
            root = root.value
        return not (
            isinstance(root, ast.Name)
            and root.id not in self.frame.code.co_varnames
            and isinstance(self.frame.globals.get(root.id), ModuleType)
        )

    def holds(self, expression: ast.expr) -> bool:
        """Whether the expression, read again before the last call, is what it was: it reads names and forms only."""
        if not _reads_only(expression):
            return False
        here = self.source.file.start(expression)
        there = self.source.file.start(self.expression(self.last))
        for part in ast.walk(expression):
            if isinstance(part, ast.Name):
                for other in self.source.names(part.id):
                    if isinstance(other.ctx, (ast.Store, ast.Del)) and self._between(other, here, there):
                        return False
        return True

    def _between(self, name: ast.Name, here: int, there: int) -> bool:
        """Whether ``name`` is bound after ``here`` is read and before the last call; its own assignment comes after."""
        if self.source.statement(name) is self.source.statement(self.expression(self.last)):
            return False
        return self.source.file.end(self.source.statement(name)) > here and self.source.file.start(name) < there


def _parts(expression: ast.AST) -> Iterator[ast.expr]:
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
    elif isinstance(expression, ast.Compare):
        yield from (expression.left, *expression.comparators)
    elif isinstance(expression, ast.Call):
        if isinstance(expression.func, ast.Attribute):
            yield expression.func.value
        for argument in (*expression.args, *(keyword.value for keyword in expression.keywords)):
            if isinstance(argument, (ast.List, ast.Tuple)):
                yield from argument.elts
            yield argument


def _read(target: ast.expr) -> ast.expr | None:
    return target if isinstance(target, ast.Name) else None


def _reads_only(expression: ast.expr) -> bool:
    for part in ast.walk(expression):
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
            if name not in _LOOKING_CALLS:
                return False
        elif isinstance(
            part, (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.ListComp, ast.GeneratorExp)
        ):
            return False
    return True


def _user(value: Value, users: frozenset[Node]) -> str:
    return next((user.op for user in users if value in user.inputs), "the pattern")
