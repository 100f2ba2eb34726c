"""How a tensor or a number of the recording is spelled in the source, and whether that spelling still holds later."""

from __future__ import annotations

import ast
import inspect
from functools import cached_property
from types import BuiltinFunctionType, ModuleType

from torch import Tensor, nn

from gradscope.patching.edit.handed import handed
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import INLINE, name_chain, names_in, parts_read, private, reads_only, walked, within
from gradscope.patching.match import Scalar, Size
from gradscope.recording.graph import Frame, Node, Value
from gradscope.recording.operations import canonical, canonical_name


class Texts:
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
        """Where the call ``last`` stands."""
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
        """The expressions that call torch themselves, also in a lambda or a comprehension."""
        found = {part for part, nodes in self._made.items() if nodes[-1].places[0].frame is self.frame}
        for node in self.nodes:
            if node.places[0].frame.code.co_name in INLINE:
                inner = self._innermost(node)
                found |= {inner} if inner is not None else set()
        return found

    def calls_in(self, statement: ast.stmt) -> list[tuple[ast.AST, Node]]:
        """The calls that a statement made, and the expression of each; not those of statements inside it."""
        return self._standing.get(statement, [])

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
            return value.alive and self.attribute(expression) is value.tensor()
        made = [node for node in self._made.get(expression, []) if node.index < at.index]
        return bool(made) and any(output.content == value.content for output in made[-1].outputs)

    def is_tensor(self, expression: ast.expr) -> bool:
        """Whether an expression was a tensor in the recorded run, wherever it stands."""
        if isinstance(expression, ast.Name):
            places = (node.place_in(self.frame) for node in self.nodes)
            return any(place is not None and expression.id in place.names for place in places)
        return expression in self._made or isinstance(self.attribute(expression), Tensor)

    def operand(self, value: Value, users: frozenset[Node]) -> tuple[ast.expr, Node]:
        """An expression for ``value`` in one of the calls ``users``, and that call; names come before calls."""
        found: list[tuple[ast.expr, Node]] = []
        for user in sorted(users, key=lambda node: node.index):
            if value in user.inputs:
                found += [(part, user) for part in parts_read(self.expression(user)) if self.denotes(part, value, user)]
        if not found:
            raise Refusal(f"no expression in {self.frame.code.co_name} is the tensor that {_user(value, users)} reads")
        return min(found, key=lambda pair: not isinstance(pair[0], ast.Name))

    def spelled(self, node: Node) -> ast.expr | ast.stmt | None:
        """Where a call stands; in a lambda or a comprehension the expression inside; of an assignment all of it."""
        inline = node.places[0].frame.code.co_name in INLINE
        found = self._innermost(node) if inline else self.expression(node)
        if node.op == "setitem" and isinstance(found, ast.Subscript):
            return self.source.statement(found)
        return found

    def scalar(self, scalar: Scalar) -> ast.expr | str:
        """The expression of a number."""
        node, expression = scalar.node, self.spelled(scalar.node)
        inline = node.places[0].frame.code.co_name in INLINE
        if node.places[0].frame is not self.frame and node.caller is None and not inline:
            return self._scalar_below(scalar)
        if isinstance(expression, ast.AugAssign) and scalar.position == 1:
            return expression.value
        if isinstance(expression, ast.Assign) and node.op == "setitem" and scalar.position == 2:
            plain = all(isinstance(target, (ast.Subscript, ast.Name)) for target in expression.targets)
            if plain:
                return expression.value
        for sides in _sides(expression):
            for side, other in (sides, sides[::-1]):
                if any(self.denotes(side, value, node) for value in node.inputs):
                    return other
        if isinstance(expression, ast.Call) and self.calls(expression, node):
            found = self._argument(expression, node, scalar)
            if found is not None:
                return found
            if scalar.otherwise:
                return scalar.otherwise
        raise Refusal(f"how {node.op} spells its {scalar.name or 'number'} is not understood")

    def _scalar_below(self, scalar: Scalar) -> ast.expr | str:
        """A number that a helper is handed or writes down, or that a method of the same module has as its attribute."""
        inner = scalar.node.places[0].frame
        source = FunctionSource.of(inner.code, {self.source.file.name: self.source.file})
        texts = Texts(source, inner, [node for node in self.nodes if node.place_in(inner) is not None], scalar.node)
        found = texts.scalar(scalar)
        if isinstance(found, (str, ast.Constant)):
            return found if isinstance(found, str) else source.file.of(found)
        given = handed(found, scalar.node, source, self.frame, self.source)
        if given is not None:
            return given if within(self.source.definition, given) else source.file.of(given)
        part: ast.expr = found
        while isinstance(part, ast.Attribute):
            part = part.value
        own = inner.owner is not None and inner.owner is self.frame.owner
        names = {each.id for each in (part,) if isinstance(each, ast.Name)} | set(self._first())
        if not own or names != set(inner.code.co_varnames[:1]) or isinstance(found, ast.Name):
            raise Refusal(f"{scalar.node.op} gets its number in {inner.code.co_name}")
        if any(
            isinstance(each.ctx, ast.Store)
            for text in (self.source, source)
            for name in names
            for each in text.names(name)
        ):
            raise Refusal(f"{min(names)} is bound anew")
        return source.file.of(found)

    def size(self, size: Size) -> ast.expr | None:
        """The expression of one of a view's sizes; None where it is left to torch.

        Raises:
            Refusal: it is not spelled in the function itself, where the new code can read it.
        """
        call = self._innermost(size.node)
        if not isinstance(call, ast.Call) or call.keywords:
            raise Refusal(f"a size of {size.node.op} is not written where it can be read")
        # "view(sizes)" and "unflatten(dim, sizes)" as a method; a function has the tensor before.
        skipped = int(not self._is_method(call.func)) + int(size.node.op == "unflatten")
        sizes: list[ast.expr] = call.args[skipped:]
        if len(sizes) == 1:
            sizes = self._spread(sizes[0])
        stars = [index for index, each in enumerate(sizes) if isinstance(each, ast.Starred)]
        if not stars and len(sizes) == size.count:
            found = sizes[size.position]
        elif stars and size.count - size.position < len(sizes) - stars[-1]:
            found = sizes[size.position - size.count]
        else:
            raise Refusal(f"line {call.lineno}: which of the sizes it is is not understood")
        if isinstance(found, ast.UnaryOp) and ast.unparse(found) == "-1":
            return None
        if names_in(found) & self._bound_inside(found) or not reads_only(found):
            raise Refusal(f"line {found.lineno}: {self.source.file.of(found)} cannot be read again")
        return found

    def _bound_inside(self, expression: ast.expr) -> set[str]:
        """The names that lambdas and comprehensions around an expression bind."""
        found: set[str] = set()
        part: ast.AST = expression
        while not isinstance(part, ast.stmt):
            part = self.source.file.parents[part]
            if isinstance(part, ast.Lambda):
                found |= {each.arg for each in walked(part.args) if isinstance(each, ast.arg)}
            elif isinstance(part, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
                found |= {name for each in part.generators for name in names_in(each.target)}
        return found

    def _first(self) -> tuple[str, ...]:
        """The name of the frame's own module."""
        return self.frame.code.co_varnames[:1] if self.frame.owner is not None else ()

    def _spread(self, expression: ast.expr) -> list[ast.expr]:
        """The parts of a tuple, or of the one that is all a name is ever bound to."""
        if isinstance(expression, ast.Name):
            expression = self._bound_once(expression) or expression
        return expression.elts if isinstance(expression, (ast.Tuple, ast.List)) else [expression]

    def _bound_once(self, name: ast.Name) -> ast.expr | None:
        """What a name is bound to, by an assignment that is its only one."""
        homes = self.source.assignments(name)
        if len(homes) == 1 and len(homes[0].targets) == 1:
            return homes[0].value if isinstance(homes[0].targets[0], ast.Name) else None
        return None

    def _innermost(self, node: Node) -> ast.expr | ast.stmt | None:
        """Where a call stands: in the function itself, or in a lambda or a comprehension inside it."""
        place = node.places[0]
        inside = place.frame.code.co_filename == self.frame.code.co_filename
        return self.source.at(place.span) if inside else None

    def resolved(self, scalar: Scalar) -> ast.expr | str:
        """The expression of a number; of a name, what that was bound to."""
        found = self.scalar(scalar)
        return self._bound_once(found) or found if isinstance(found, ast.Name) else found

    def is_of_last_size(self, expression: ast.expr, at: Node, size: int) -> bool:
        """Whether a number is made of the last size, ``size``, of tensors alone."""
        place = at.place_in(self.frame)
        if not self.holds(expression):
            return False
        for part in walked(expression):
            if not isinstance(part, ast.Name):
                continue
            value = place.names.get(part.id) if place is not None else None
            if value is None:
                held = self.frame.globals.get(part.id)
                if part.id in self.frame.code.co_varnames or not isinstance(held, (ModuleType, BuiltinFunctionType)):
                    return False
            elif (
                size_read(part, self.source) not in {-1, len(value.shape) - 1}
                or value.shape[-1] != size
                or value.shape.count(size) != 1
            ):
                return False
        return True

    def is_of_parent(self, node: Node) -> bool:
        """Whether it was made by ``super().forward(...)``: a module of the user's that widens one of torch's."""
        call = self.expression(node)
        function = call.func if isinstance(call, ast.Call) else None
        if not isinstance(function, ast.Attribute) or function.attr != "forward" or node.caller is None:
            return False
        above = function.value
        plain = isinstance(above, ast.Call) and not above.args and ast.unparse(above.func) == "super"
        return plain and node.caller is self.frame.owner and "super" not in self.frame.globals

    def module(self, node: Node) -> ast.expr | None:
        """The expression of the module that made the call: ``self.drop`` in ``self.drop(x)``."""
        expression = self.expression(node)
        if isinstance(expression, ast.Call) and self.called_module(expression, node) is not None:
            return expression.func
        return None

    def called_module(self, call: ast.Call, node: Node | None = None) -> object:
        """The module that an expression calls: an attribute of the frame's own, or what a name held at ``node``."""
        found = self.attribute(call.func)
        if found is None and node is not None and isinstance(call.func, ast.Name):
            return node.caller
        return found if isinstance(found, nn.Module) else None

    def attribute(self, expression: ast.expr) -> object:
        """What ``self.a.b[0]`` is now; None where it is no such chain."""
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

    def calls(self, call: ast.Call, node: Node) -> bool:
        """Whether an expression calls the operation itself or a module of it, not something that calls it in turn."""
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
        """What ``torch.linalg.vector_norm`` is; None where it does not begin with a module that was imported."""
        first, *rest = reversed(list(name_chain(function)))
        found: object = self.frame.globals.get(first) if first not in self.frame.code.co_varnames else None
        if not isinstance(found, ModuleType):
            return None
        for part in rest:
            found = getattr(found, part, None)
        return found

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
        if not reads_only(expression):
            return False
        here = self.source.file.start(expression)
        there = self.source.file.start(self.stays)
        return not self.bound_between(expression, here, there)

    def bound_between(self, expression: ast.AST, here: int, there: int) -> bool:
        """Whether a name or an attribute in ``expression`` is bound by a statement between ``here`` and ``there``.

        Offsets in the file; the statement that holds the last call binds its names after it.
        """
        names = {part.id for part in walked(expression) if isinstance(part, ast.Name)}
        attributes = {part.attr for part in walked(expression) if isinstance(part, ast.Attribute)}
        own = self.statement
        others = [node for name in names for node in self.source.bound_otherwise.get(name, [])]
        for other in [*self.source.bindings, *others]:
            same = isinstance(other, ast.Name) and other.id in names
            same = same or (isinstance(other, ast.Attribute) and other.attr in attributes) or other in others
            if not same or self.source.statement(other) is own:
                continue
            if self.source.file.end(self.source.statement(other)) > here and self.source.file.start(other) < there:
                return True
        return False

    def truth(self, test: ast.expr) -> bool | None:
        """Whether a condition held in the recorded run; None where the recording does not tell."""
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
        """Whether it is a constant, an argument or an attribute that is no tensor, and what it was."""
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
        """Whether it makes a module of torch's own, as in ``nn.Softmax(dim=-1)(x)``."""
        found: object = None
        for part in reversed(list(name_chain(call.func))):
            found = self.frame.globals.get(part) if found is None else getattr(found, part, None)
        return isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith("torch.")


def size_read(name: ast.Name, source: FunctionSource) -> int | None:
    """Return the dimension whose size is read of a tensor: ``x.size(-1)``, ``x.shape[-1]``; None where it is not."""
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


def _sides(expression: ast.AST | None) -> list[tuple[ast.expr, ast.expr]]:
    """Left and right of an operator; nothing of any other expression."""
    if isinstance(expression, ast.BinOp):
        return [(expression.left, expression.right)]
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        return [(expression.left, expression.comparators[0])]
    return []


def _user(value: Value, users: frozenset[Node]) -> str:
    return next((user.op for user in users if value in user.inputs), "the pattern")
