"""Numbers that a proof relied on: written down, of a tensor's form, or asked again at each call.

A match holds for the numbers of the recorded run. Those that the new code reads itself may change, and so may the sizes
of a view, which fit or raise. Any other that is no literal becomes a condition, with the old code behind it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gradscope.patching.graph import makers, number
from gradscope.patching.match import Argument, FromSizes, Given, Match, Of, Piece, Scalar, Setting
from gradscope.patching.reading import INLINE
from gradscope.patching.recording import Frame, Node, Recording, Value
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource, SourceFile
from gradscope.patching.syntax import is_name
from gradscope.patching.texts import Texts

# Their numbers are sizes or places: another one does not fit, or moves what the new code is given all the same.
_OF_FORM = frozenset(
    {"view", "reshape", "expand", "unflatten", "flatten", "repeat", "split", "chunk", "getitem", "narrow", "select"}
    | {"ones", "zeros", "empty", "arange", "new_ones", "new_zeros", "new_empty", "eye"}
)
_PLAIN = (bool, int, float, str)
_LEFT_OUT = "the default"  # torch's own functions pass on what their caller does not write
# Only in these a user writes numbers: what iterates over a tensor calls unbind.
_WRITTEN = (ast.Call, ast.BinOp, ast.Compare, ast.AugAssign, ast.Assign)


@dataclass(frozen=True)
class Known:
    """What an expression was in the recorded run, and must be for the new code."""

    expression: ast.expr
    text: str  # the test


def relied_on(match: Match, recording: Recording, texts: Texts) -> list[Known]:
    """The conditions under which ``match`` holds, asked in the function of ``texts``, each once.

    Raises:
        Refusal: a number can be asked for neither there nor anywhere.
    """
    finder = _Finder(recording, texts)
    read = set(_read_anew(match.arguments))
    given_whole = {piece.node for piece in _pieces(match.arguments) if isinstance(piece, Given)}
    found: dict[str, Known] = {}
    for node in sorted(_calls(match), key=lambda node: node.index):
        if node.caller is not None or node.op in _OF_FORM or node in given_whole:
            continue
        for scalar, value in _numbers(node):
            if (node, scalar.position) not in read and (node, scalar.name) not in read:
                known = finder.known(scalar, value)
                if known is not None:
                    found.setdefault(known.text, known)
        for value in _held(node, match, read):
            known = finder.held(value, node)
            found.setdefault(known.text, known)
    return list(found.values())


def _calls(match: Match) -> set[Node]:
    """Those of the pattern, and those that made the numbers which it reads as tensors."""
    nodes = match.nodes | match.optional
    numbers = {value for node in nodes for value in node.inputs if _is_number(value) and value.producer not in nodes}
    return {*nodes, *(node for value in numbers - _operands(match) for node in makers(value))}


def _held(node: Node, match: Match, read: set[tuple[Node, int | str]]) -> list[Value]:
    """Tensors of one number that were there before, as buffers are, and that the new code does not read."""
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    operands = _operands(match)
    return [
        value
        for place, value in places
        if isinstance(value, Value) and value.producer is None and _is_number(value)
        if value not in operands and (node, place) not in read
    ]


def _operands(match: Match) -> set[Value]:
    return {piece.value for piece in _pieces(match.arguments) if isinstance(piece, Of)}


def _is_number(value: Value) -> bool:
    return value.shape == () and number(value) is not None


def _pieces(arguments: tuple[Argument, ...]) -> Iterator[Piece]:
    left: list[Piece] = [piece for argument in arguments for piece in argument.pieces]
    while left:
        piece = left.pop()
        yield piece
        if isinstance(piece, FromSizes):
            left += piece.pieces
        elif isinstance(piece, Setting):
            left.append(piece.scalar)


def _read_anew(arguments: tuple[Argument, ...]) -> Iterator[tuple[Node, int | str]]:
    """What of a call the new code reads itself, by position and by name."""
    for piece in _pieces(arguments):
        if isinstance(piece, Scalar):
            yield piece.node, piece.position
            if piece.name:
                yield piece.node, piece.name


def settings_read(match: Match, module: object) -> set[str]:
    """The attributes of a module of torch's that the new code reads."""
    pieces = _pieces(match.arguments)
    return {piece.attribute for piece in pieces if isinstance(piece, Setting) and piece.node.caller is module}


def _numbers(node: Node) -> Iterator[tuple[Scalar, Any]]:
    for position, value in enumerate(node.args):
        if _is_plain(value) and (node.op, position) != ("setitem", 1):  # a place, as of getitem
            yield Scalar(node, position, otherwise=_LEFT_OUT), value
    for name, value in node.kwargs.items():
        if _is_plain(value):
            yield Scalar(node, len(node.args), name, otherwise=_LEFT_OUT), value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


class _Finder:
    def __init__(self, recording: Recording, texts: Texts) -> None:
        self.recording, self.texts, self.frame = recording, texts, texts.frame
        self.files: dict[str, SourceFile] = {texts.source.file.name: texts.source.file}

    def known(self, scalar: Scalar, value: Any) -> Known | None:
        """The condition that a number is the same; None where it always is."""
        texts = self._texts_at(scalar.node)
        if not isinstance(texts.spelled(scalar.node), _WRITTEN):
            return None
        found = texts.scalar(scalar)
        if isinstance(found, str):
            return None
        expression = _resolved(found, texts.source)
        if _is_certain(expression, texts):
            return None
        text = self._text(expression, texts)
        return Known(expression, _test(expression, text, value, scalar.node.op in _ARITHMETIC))

    def held(self, value: Value, node: Node) -> Known:
        """The condition that a tensor is the number that it was, and gets no gradient."""
        texts = self._texts_at(node)
        expression, _ = texts.operand(value, frozenset({node}))
        text, held = self._text(expression, texts), number(value)
        equal = f"{_bracketed(expression, text)} == {_spelled(held, text, expression.lineno)}"
        return Known(expression, f"{equal} and not {_bracketed(expression, text)}.requires_grad")

    def _text(self, expression: ast.expr, texts: Texts) -> str:
        text = texts.source.file.of(expression)
        if texts is not self.texts and not self._same_owner(expression, texts.frame):
            raise Refusal(f"line {expression.lineno}: {text} may be another number next time")
        return text

    def _texts_at(self, node: Node) -> Texts:
        frame = next(place.frame for place in node.places if place.frame.code.co_name not in INLINE)
        return self.texts if frame is self.frame else self._texts_of(frame, node)

    def _texts_of(self, frame: Frame, last: Node) -> Texts:
        source = FunctionSource.of(frame.code, self.files)
        return Texts(source, frame, self.recording.executed_in(frame), last)

    def _same_owner(self, expression: ast.expr, frame: Frame) -> bool:
        """Whether it is an attribute of the module whose method is edited, by the same name for that."""
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


def _resolved(expression: ast.expr, source: FunctionSource) -> ast.expr:
    """Of a name that is bound once, what that is."""
    for _ in range(8):
        if not isinstance(expression, ast.Name):
            break
        homes = source.assignments(expression)
        if len(homes) != 1 or len(homes[0].targets) != 1 or not isinstance(homes[0].targets[0], ast.Name):
            break
        expression = homes[0].value
    return expression


def _is_certain(expression: ast.AST, texts: Texts, depth: int = 0) -> bool:
    """Whether it is written down, or made of a tensor's form and of what modules of Python hold, as ``math.pi``."""
    if depth > _DEEPEST:  # n = n + 1
        return False
    expression = _resolved(expression, texts.source) if isinstance(expression, ast.expr) else expression
    parts: list[ast.expr] = []
    certain = isinstance(expression, (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List))
    if isinstance(expression, ast.JoinedStr):
        return all(isinstance(part, ast.Constant) for part in expression.values)
    if isinstance(expression, ast.Name):
        values = [home.value for home in texts.source.assignments(expression)]
        values = [value for value in values if not _hands_on(value, expression.id)]
        return bool(values) and all(_is_certain(value, texts, depth + 1) for value in values)
    if isinstance(expression, ast.Attribute):
        certain = _is_form(expression, _FORMS, texts) or _of_module(expression, texts)
        if not certain and isinstance(expression.value, ast.Call):  # finfo(...).min
            certain, parts = True, [expression.value]
    elif isinstance(expression, ast.Subscript):
        certain, parts = True, [expression.value, expression.slice]
    elif isinstance(expression, ast.Call):
        function = expression.func
        certain = isinstance(function, ast.Name) and function.id in _PURE
        if isinstance(function, ast.Attribute):
            certain = _is_form(function, _ASKED, texts) or _of_module(function, texts)
        parts = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    elif certain:
        parts = [part for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr)]
    return certain and all(_is_certain(part, texts, depth + 1) for part in parts)


def _hands_on(value: ast.expr, name: str) -> bool:
    """Whether it makes a tensor of the number that ``name`` was: ``fill = torch.full([], fill)``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr == "to":
        return _hands_on(value.func.value, name)
    return value.func.attr in {"tensor", "as_tensor", "full"} and any(is_name(each, name) for each in value.args)


_PURE = frozenset({"float", "int", "abs", "min", "max", "len", "round"})
_FORMS = frozenset({"shape", "ndim", "dtype", "device"})
_ASKED = frozenset({"size", "dim", "numel"})
_DEEPEST = 24
# Where an integer may become a parameter.
_ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "float_power", "floor_divide", "remainder", "addcmul"}
    | {"addcdiv", "masked_fill", "clamp", "where", "full", "lerp", "maximum", "minimum", "setitem"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)


def _of_module(expression: ast.expr, texts: Texts) -> bool:
    """``math.sqrt``, ``torch.pi``: an attribute of a module of somebody else's."""
    root = expression
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id in texts.frame.code.co_varnames:
        return False
    held = texts.frame.globals.get(root.id)
    return isinstance(held, ModuleType) and held.__name__.partition(".")[0] in {"math", "torch", "numpy", "cmath"}


def _is_form(expression: ast.Attribute, names: frozenset[str], texts: Texts) -> bool:
    """Whether it asks a tensor for its form: ``self.size`` and ``self.ndim`` are the user's own."""
    return expression.attr in names and texts.is_tensor(expression.value)


def _test(expression: ast.expr, text: str, value: Any, multiplies: bool) -> str:
    """The condition that it is ``value`` and no tensor, which might want a gradient or hold several numbers."""
    if isinstance(value, bool):
        return f"{_bracketed(expression, text)} is {value}"
    equal = f"{_bracketed(expression, text)} == {_spelled(value, text, expression.lineno)}"
    if type(value) is float or (type(value) is int and multiplies):  # any other is a dimension, a class, a size
        return f"isinstance({text}, {type(value).__name__}) and {equal}"
    return equal


def _bracketed(expression: ast.expr, text: str) -> str:
    simple = isinstance(expression, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if simple else f"({text})"


def _spelled(value: Any, text: str, line: int) -> str:
    """The number as Python reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise Refusal(f"line {line}: {text} is not a number")
        return f'float("{value}")'
    return repr(tuple(value) if isinstance(value, tuple) else value)  # torch.Size is one
