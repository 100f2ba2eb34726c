"""The recorded calls of one function, the expressions that they stand at, and what its names held."""

from __future__ import annotations

import ast
from functools import cached_property
from types import ModuleType

from torch import Tensor, nn

from gradscope.patching.edit.source import FunctionSource, Refusal
from gradscope.patching.edit.syntax import INLINE, name_chain, private
from gradscope.recording.graph import Frame, Node, Value
from gradscope.recording.operations import canonical, canonical_name


class CallSites:
    """Spellings inside one frame, as of the call ``last``."""

    def __init__(self, source: FunctionSource, frame: Frame, nodes: list[Node], last: Node) -> None:
        self.source, self.frame, self.nodes, self.last = source, frame, nodes, last
        self._made: dict[ast.AST, list[Node]] = {}  # the last call that an expression made is its value
        self._standing: dict[ast.stmt, list[tuple[ast.AST, Node]]] = {}
        for node in nodes:
            place = node.place_in(frame)
            expression = source.at(place.span) if place is not None else None
            if expression is not None:
                self._made.setdefault(expression, []).append(node)
                self._standing.setdefault(source.statement(expression), []).append((expression, node))

    @cached_property
    def stays(self) -> ast.expr | ast.stmt:
        """Return where the call ``last`` stands."""
        return self.expression(self.last)

    @cached_property
    def statement(self) -> ast.stmt:
        """The statement around the call ``last``."""
        return self.source.statement(self.stays)

    @cached_property
    def block(self) -> list[ast.stmt]:
        """The statements that ``statement`` is one of."""
        return self.source.block(self.statement)

    @property
    def recorded(self) -> set[ast.AST]:
        """Return the expressions that call torch themselves, also in a lambda or a comprehension."""
        found = {part for part, nodes in self._made.items() if nodes[-1].places[0].frame is self.frame}
        for node in self.nodes:
            if node.places[0].frame.code.co_name in INLINE:
                inner = self.innermost(node)
                found |= {inner} if inner is not None else set()
        return found

    def calls_in(self, statement: ast.stmt) -> list[tuple[ast.AST, Node]]:
        """Return the calls that ``statement`` made, each with its expression; not those of statements inside it."""
        return self._standing.get(statement, [])

    def expression(self, node: Node) -> ast.expr | ast.stmt:
        """Return the expression that the call ``node`` stands at."""
        place = node.place_in(self.frame)
        found = self.source.at(place.span) if place is not None else None
        if found is None:
            raise Refusal(f"{node.op} appears in no expression of {self.frame.code.co_name}")
        return found

    def denotes(self, expression: ast.AST, value: Value, at: Node) -> bool:
        """Return whether ``expression``, read by the call ``at``, is the tensor ``value``."""
        if isinstance(expression, ast.Name):
            place = at.place_in(self.frame)
            held = place.names.get(expression.id) if place is not None else None
            return held is not None and held.content == value.content
        if isinstance(expression, ast.Attribute) and expression not in self._made:
            of_it = at.inputs == (value,) and self._is_receiver(expression, at)
            return value.alive and (of_it or self.attribute(expression) is value.tensor())
        made = [node for node in self._made.get(expression, []) if node.index < at.index]
        return bool(made) and any(output.content == value.content for output in made[-1].outputs)

    def _is_receiver(self, expression: ast.expr, at: Node) -> bool:
        """Return whether it is the parameter whose method the call ``at`` is: ``module.sinks`` in a plain function."""
        if len(at.inputs) != 1 or not at.places or at.places[0].frame is not self.frame:
            return False
        value, call = at.inputs[0], self.source.at(at.places[0].span)
        if not isinstance(expression, ast.Attribute) or not isinstance(value.tensor(), nn.Parameter):
            return False
        if isinstance(call, ast.Subscript):
            return call.value is expression
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return False
        is_method = at.function is getattr(Tensor, call.func.attr, None) and at.args[:1] == (value,)
        return is_method and call.func.value is expression and len(call.args) == len(at.args) - 1

    def is_tensor(self, expression: ast.expr) -> bool:
        """Return whether ``expression`` was a tensor in the recorded step, wherever it stands."""
        if isinstance(expression, ast.Name):
            places = (node.place_in(self.frame) for node in self.nodes)
            return any(place is not None and expression.id in place.names for place in places)
        known = expression in self._made or isinstance(self.attribute(expression), Tensor)
        return known or any(self._is_receiver(expression, node) for node in self.nodes)

    def spelled(self, node: Node) -> ast.expr | ast.stmt | None:
        """Return where a call stands: the expression inside a lambda or a comprehension; of an assignment all of it."""
        inline = node.places[0].frame.code.co_name in INLINE
        found = self.innermost(node) if inline else self.expression(node)
        if node.op == "setitem" and isinstance(found, ast.Subscript):
            return self.source.statement(found)
        return found

    def innermost(self, node: Node) -> ast.expr | ast.stmt | None:
        """Return where a call stands: in the function itself, or in a lambda or a comprehension inside it."""
        place = node.places[0]
        inside = place.frame.code.co_filename == self.frame.code.co_filename
        return self.source.at(place.span) if inside else None

    def is_of_parent(self, node: Node) -> bool:
        """Return whether ``super().forward(...)`` made the call, of a module that widens one of torch's."""
        call = self.expression(node)
        function = call.func if isinstance(call, ast.Call) else None
        if not isinstance(function, ast.Attribute) or function.attr != "forward" or node.caller is None:
            return False
        above = function.value
        plain = isinstance(above, ast.Call) and not above.args and ast.unparse(above.func) == "super"
        return plain and node.caller is self.frame.owner and "super" not in self.frame.globals

    def module(self, node: Node) -> ast.expr | None:
        """Return the expression of the module that made the call: ``self.drop`` in ``self.drop(x)``."""
        expression = self.expression(node)
        if isinstance(expression, ast.Call) and self.called_module(expression, node) is not None:
            return expression.func
        return None

    def called_module(self, call: ast.Call, node: Node | None = None) -> object:
        """Return the module that ``call`` calls: an attribute of the frame's own, or what a name held at ``node``."""
        found = self.attribute(call.func)
        if found is None and node is not None and isinstance(call.func, ast.Name):
            return node.caller
        return found if isinstance(found, nn.Module) else None

    def attribute(self, expression: ast.expr) -> object:
        """Return what ``self.a.b[0]`` is now; None where ``expression`` is no such chain."""
        first = self.frame.code.co_varnames[:1]
        if isinstance(expression, ast.Name):
            return self.frame.owner if first == (expression.id,) else None
        if isinstance(expression, ast.Attribute):
            under = self.attribute(expression.value)
            return None if under is None else getattr(under, private(expression.attr, self.frame.code), None)
        if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            under = self.attribute(expression.value)
            try:
                return None if under is None else under[expression.slice.value]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return None

    def is_call_of(self, call: ast.Call, node: Node) -> bool:
        """Return whether ``call`` calls the operation of ``node`` or its module, and no function around it."""
        held = self.attribute(call.func)
        if isinstance(call.func, ast.Name):
            held = self.frame.globals.get(call.func.id)
        if held is None and isinstance(call.func, ast.Attribute):
            held = self._of_a_library(call.func)
            if held is None:
                return canonical_name(call.func.attr) == node.op
        if held is None:
            return False
        return isinstance(held, nn.Module) or (callable(held) and canonical(held) == node.op)

    def _of_a_library(self, function: ast.Attribute) -> object:
        """Return what ``torch.linalg.vector_norm`` is; None where it does not begin with an imported module."""
        first, *rest = reversed(list(name_chain(function)))
        found: object = self.frame.globals.get(first) if first not in self.frame.code.co_varnames else None
        if not isinstance(found, ModuleType):
            return None
        for part in rest:
            found = getattr(found, part, None)
        return found

    def truth(self, test: ast.expr) -> bool | None:
        """Return the outcome of a condition in the recorded step; None where the recording does not tell."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            held = self.truth(test.operand)
            return None if held is None else not held
        known, value = self._plain(test)
        if known:
            return bool(value)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            (known, left), (also, right) = self._plain(test.left), self._plain(test.comparators[0])
            if known and also and isinstance(test.ops[0], (ast.Is, ast.Eq)):
                return bool(left is right if right is None else left == right)
            if known and also and isinstance(test.ops[0], (ast.IsNot, ast.NotEq)):
                return bool(left is not right if right is None else left != right)
        return None

    def _plain(self, expression: ast.expr) -> tuple[bool, object]:
        """Return whether ``expression`` is a constant, an argument or an attribute that is no tensor, and its value."""
        if isinstance(expression, ast.Constant):
            return True, expression.value
        if isinstance(expression, ast.Name) and expression.id in self.frame.settings:
            stored = [each for each in self.source.names(expression.id) if isinstance(each.ctx, ast.Store)]
            return not stored, self.frame.settings[expression.id]
        if isinstance(expression, ast.Attribute):
            found = self.attribute(expression)
            return isinstance(found, (bool, int, float, str)), found
        return False, None

    def makes_module(self, call: ast.Call) -> bool:
        """Return whether ``call`` makes a module of torch's own, as in ``nn.Softmax(dim=-1)(x)``."""
        found: object = None
        for part in reversed(list(name_chain(call.func))):
            found = self.frame.globals.get(part) if found is None else getattr(found, part, None)
        return isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith("torch.")
