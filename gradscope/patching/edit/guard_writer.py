"""What the new code asks before it runs: the expression of something that the proof relied on, and the test."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from gradscope.patching.edit.bindings import is_given
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.callees import (
    callee_to_ask,
    check_called_by_name,
    check_helper,
    check_method,
    check_not_replaced,
    helper_to_ask,
    is_written,
    name_of,
    settings_of,
)
from gradscope.patching.edit.constants import is_certain, is_half_of_last, is_of_other_sizes, resolved
from gradscope.patching.edit.expressions import handed, number_of, operand_of
from gradscope.patching.edit.side_effects import choice_guard, choice_of
from gradscope.patching.edit.source import FunctionSource, Refusal, SourceFile, SourceGuard
from gradscope.patching.edit.syntax import INLINE, within
from gradscope.patching.match.behaviour import REDUCTIONS
from gradscope.patching.match.graph import number
from gradscope.patching.match.match import Scalar
from gradscope.recording.graph import Frame, Node, Place, Recording, Value

# Only in these a user writes numbers: what iterates over a tensor calls unbind.
_WRITTEN = (ast.Call, ast.BinOp, ast.Compare, ast.AugAssign, ast.Assign)
# Where an integer may become a parameter.
_ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "float_power", "floor_divide", "remainder", "addcmul"}
    | {"addcdiv", "masked_fill", "clamp", "where", "full", "lerp", "maximum", "minimum", "setitem"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)
# Other calls whose results depend on a number, and fit whatever it is: the power of a norm, a tensor of it.
_COUNTING = REDUCTIONS | {"tensor", "as_tensor", "scalar_tensor", "new_tensor", "new_full", "fill_"}


class GuardWriter:
    """Asks for what calls of a pattern relied on, in the function of ``calls``."""

    def __init__(self, recording: Recording, calls: CallSites) -> None:
        self.recording, self.calls, self.frame = recording, calls, calls.frame
        self.files: dict[str, SourceFile] = {calls.source.file.name: calls.source.file}

    def of_number(self, scalar: Scalar, value: Any, operands: Collection[Value]) -> SourceGuard | None:
        """Return the guard that a number is the same; None where it always is, as a size of ``operands``."""
        calls = self.calls_at(scalar.node)
        if not isinstance(calls.spelled(scalar.node), _WRITTEN):
            return None
        found = number_of(scalar, calls)
        if isinstance(found, str):
            return None
        found, calls = self.as_handed(found, scalar.node, calls)
        op = scalar.node.op
        multiplies = op in _ARITHMETIC
        is_size = op == "full" and (scalar.position == 0 or scalar.name == "size")
        if (
            (multiplies or op in _COUNTING)
            and not is_size
            and is_certain(found, calls)
            and is_of_other_sizes(found, scalar.node, operands, calls)
        ):
            expression = resolved(found, calls.source)
            return SourceGuard(expression, f"{bracketed(expression, self.text(expression, calls))} == {value}")
        return self.of_value(found, value, calls, multiplies)

    def as_handed(self, found: ast.expr, node: Node, calls: CallSites) -> tuple[ast.expr, CallSites]:
        """Return what the edited function hands a helper for its argument ``found``; any other expression as it is."""
        if calls is self.calls:
            return found, calls
        given = handed(found, node, calls.source, self.frame, self.calls.source)
        if given is None:
            return found, calls
        return given, self.calls if within(self.calls.source.definition, given) else calls

    def of_index(self, node: Node) -> Iterator[SourceGuard]:
        """Yield the guards that an index shows the same part.

        Raises:
            Refusal: it is not written where it is used.
        """
        calls = self.calls_at(node)
        spelled = calls.expression(node) if node.op == "setitem" else calls.spelled(node)
        if not isinstance(spelled, ast.Subscript):  # what iterates, or another function of torch's that indexes
            return
        index, value = resolved(spelled.slice, calls.source), node.args[1]
        written = index.elts if isinstance(index, ast.Tuple) else [index]
        values = value if isinstance(value, tuple) else (value,)
        if len(written) != len(values) or any(isinstance(each, ast.Starred) for each in written):
            raise Refusal(f"line {index.lineno}: the value of {calls.source.file.of(index)} may change between calls")
        for part, held in _bounds(written, values):
            guard = self.of_value(part, held, calls, False)
            if guard is not None:
                yield guard

    def of_width(self, node: Node) -> SourceGuard | None:
        """Return the guard that the last dimension is as long as it was; None where it is cut in half."""
        calls = self.calls_at(node)
        spelled = calls.spelled(node)
        ends: tuple[ast.expr | None, ...]
        if isinstance(spelled, ast.Subscript):
            whole = spelled.value
            last = spelled.slice.elts[-1] if isinstance(spelled.slice, ast.Tuple) else spelled.slice
            ends = (last.lower, last.upper) if isinstance(last, ast.Slice) else (last,)
        elif isinstance(spelled, ast.Call):
            whole, size = (
                operand_of(node.inputs[0], frozenset({node}), calls)[0],
                number_of(Scalar(node, 1, "split_size"), calls),
            )
            ends = (size if isinstance(size, ast.expr) else None,)
        else:
            return None
        if all(end is None or is_half_of_last(resolved(end, calls.source), node, calls) for end in ends):
            return None
        text = bracketed(whole, self.text(whole, calls))
        return SourceGuard(whole, f"{text}.size(-1) == {node.inputs[0].shape[-1]}")

    def names_all_parts(self, node: Node) -> bool:
        """Return whether as many names are bound as there are parts, so that with more or fewer of them it raises."""
        calls = self.calls_at(node)
        parents = calls.source.file.parents
        part: ast.AST | None = calls.spelled(node)
        home = parents.get(part) if part is not None else None
        if isinstance(home, ast.comprehension) and not home.ifs:  # q, k, v = (each.transpose(1, 2) for each in ...)
            part, home = parents[home], parents[parents[home]]
        if not isinstance(home, ast.Assign) or home.value is not part:
            return False
        bound = [each.elts for each in home.targets if isinstance(each, (ast.Tuple, ast.List))]
        return any(not any(isinstance(each, ast.Starred) for each in names) for names in bound)

    def of_value(self, found: ast.expr, value: Any, calls: CallSites, multiplies: bool) -> SourceGuard | None:
        expression = resolved(found, calls.source)
        if is_certain(expression, calls):
            return None
        text = self.text(expression, calls)
        if any(self.calls.source.file.bound[name] for name in ("isinstance", "float", "int")):
            raise Refusal(f"line {expression.lineno}: the value of {text} may change between calls")
        return SourceGuard(expression, _test(expression, text, value, multiplies))

    def of_class(self, node: Node) -> SourceGuard | None:
        """Return the guard that what is called is of the class that it was; None where it always is.

        Raises:
            Refusal: that can be told by no name of the file, or a function is called that may be another one.
        """
        calls = self.calls_at(node)
        if not isinstance(node.caller, nn.Module):
            check_called_by_name(node, calls)
            return None
        expression = callee_to_ask(node, node.caller, calls)
        if expression is None:
            return None
        text, name = self.text(expression, calls), name_of(type(node.caller), self.calls)
        if name is None:
            raise Refusal(f"line {expression.lineno}: {text} may be a module of a different class in another call")
        return SourceGuard(expression, f"type({text}) is {name}")

    def of_settings(self, node: Node, read: set[str]) -> Iterator[SourceGuard]:
        """Yield guards for what a module of torch's was made with and the new code does not ``read``."""
        module, calls = node.caller, self.calls_at(node)
        call = calls.expression(node)
        if not isinstance(module, nn.Module) or not isinstance(call, ast.Call):
            return
        for name in settings_of(module):
            if name in read or calls.called_module(call) is not module or is_written(name, call.func, module, calls):
                continue
            text, value = self.text(call.func, calls), getattr(module, name)
            known = f'"{value}"' if isinstance(value, str) else value
            yield SourceGuard(call.func, f"{text}.{name} {'==' if type(value) in {int, str} else 'is'} {known}")

    def of_helpers(self, node: Node) -> Iterator[SourceGuard]:
        """Yield the guards that the user's own modules around a call are of the classes that they were.

        Raises:
            Refusal: it is called by another function than the one that is edited, which asks for nothing.
        """
        for inner, outer in pairwise(node.places):
            module = inner.frame.owner
            if inner.frame is self.frame:
                return
            calls = self.calls if outer.frame is self.frame else self._calls_of(outer.frame, node)
            call = calls.source.at(outer.span)
            yield from self._of_choice(inner, call, calls)
            if module is not None and module is outer.frame.owner:
                check_method(call, calls)
                continue
            if module is None:
                check_method(call, calls)  # a static one
                check_helper(inner.frame, call, calls)
                continue
            check_not_replaced(inner.frame.code.co_name, inner.frame, self._source_of(inner.frame).file)
            expression = helper_to_ask(inner.frame, module, call, calls)
            if expression is not None:
                text, kind = self.text(expression, calls), type(module)
                name = name_of(kind, self.calls)
                if name is None and is_given(kind.__name__, kind.__name__, self.calls.source.file):
                    raise Refusal(
                        f"line {expression.lineno}: {text} may be a module of a different class in another call"
                    )
                # That a mapping of a library gave it, as Transformers' ACT2FN, leaves the file without its name.
                test = f'type({text}).__name__ == "{kind.__name__}"' if name is None else f"type({text}) is {name}"
                yield SourceGuard(expression, test)

    def _of_choice(self, inner: Place, call: ast.AST | None, calls: CallSites) -> Iterator[SourceGuard]:
        """Yield the guard that a helper does what it did, of the two things that it may do."""
        source = self._source_of(inner.frame) if inner.frame.code.co_name not in INLINE else None
        if source is None or choice_of(source.definition) is None:
            return
        guard = choice_guard(inner, source, call, calls) if calls is self.calls else None
        if guard is None:
            name, line = inner.frame.code.co_name, source.definition.lineno
            raise Refusal(f"{name} may behave differently in another call, on line {line}")
        if guard.test:
            yield guard

    def of_buffer(self, value: Value, node: Node, called: Callable[[str], str]) -> SourceGuard:
        """Return the guard that a tensor is the number that it was, and gets no gradient."""
        calls = self.calls_at(node)
        expression, _ = operand_of(value, frozenset({node}), calls)
        text = self.text(expression, calls)
        return SourceGuard(
            expression, f"{called('is_number')}({text}, {_spelled(number(value), text, expression.lineno)})"
        )

    def text(self, expression: ast.expr, calls: CallSites) -> str:
        text = calls.source.file.of(expression)
        if calls is not self.calls and not self._same_owner(expression, calls.frame):
            raise Refusal(f"line {expression.lineno}: the value of {text} may change between calls")
        return text

    def calls_at(self, node: Node) -> CallSites:
        frame = next(place.frame for place in node.places if place.frame.code.co_name not in INLINE)
        return self.calls if frame is self.frame else self._calls_of(frame, node)

    def _calls_of(self, frame: Frame, last: Node) -> CallSites:
        return CallSites(self._source_of(frame), frame, self.recording.executed_in(frame), last)

    def _source_of(self, frame: Frame) -> FunctionSource:
        return FunctionSource.of(frame.code, self.files)

    def _same_owner(self, expression: ast.expr, frame: Frame) -> bool:
        """Return whether it is an attribute of the module whose method is edited, by the same name for that."""
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        own, first = frame.owner, frame.code.co_varnames[:1]
        return (
            isinstance(expression, ast.Attribute)
            and isinstance(root, ast.Name)
            and own is not None
            and own is self.frame.owner
            and first == (root.id,) == self.frame.code.co_varnames[:1]
        )


def _bounds(written: list[ast.expr], values: tuple[Any, ...]) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the expressions in an index that were numbers, and these; a slice where it is not written as one."""
    for part, value in zip(written, values, strict=True):
        if isinstance(part, ast.Slice) and isinstance(value, slice):
            ends = zip((part.lower, part.upper, part.step), (value.start, value.stop, value.step), strict=True)
            yield from ((end, held) for end, held in ends if end is not None)
        elif isinstance(value, (int, slice)):
            yield part, value


def _test(expression: ast.expr, text: str, value: Any, multiplies: bool) -> str:
    """Return the condition that it is ``value`` and no tensor, which might want a gradient or hold several numbers."""
    if value is None or isinstance(value, bool):  # for None a mask or a weight may be given next time
        return f"{bracketed(expression, text)} is {value}"
    equal = f"{bracketed(expression, text)} == {_spelled(value, text, expression.lineno)}"
    if type(value) is float or (type(value) is int and multiplies):  # any other is a dimension, a class, a size
        return f"isinstance({text}, {type(value).__name__}) and {equal}"
    return equal


def bracketed(expression: ast.expr, text: str) -> str:
    simple = isinstance(expression, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if simple else f"({text})"


def _spelled(value: Any, text: str, line: int) -> str:
    """Return the number as Python reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise Refusal(f"line {line}: {text} is not a number")
        return f'float("{value}")'
    return repr(tuple(value) if isinstance(value, tuple) else value)  # torch.Size is one
