"""Numbers that a proof relied on: written down, of a tensor's form, or asked again at each call.

A match holds for the numbers of the recorded run. Those that the new code reads itself may change, and so may the sizes
of a view, which fit or raise. Any other that is no literal becomes a condition, with the old code behind it.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

from torch import nn

from gradscope.patching.callees import check_helper, check_named, configured, configured_on_the_way, name_of
from gradscope.patching.graph import makers, number
from gradscope.patching.match import Argument, FromSizes, Given, Layer, Match, Of, Piece, Scalar, Setting
from gradscope.patching.reading import INLINE
from gradscope.patching.recording import Frame, Node, Recording, Value
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource, SourceFile
from gradscope.patching.syntax import is_name
from gradscope.patching.texts import Texts
from gradscope.patching.views import is_view

# Their numbers are sizes: another one does not fit.
_OF_FORM = frozenset(
    {"view", "reshape", "expand", "unflatten", "flatten", "repeat"}
    | {"ones", "zeros", "empty", "arange", "new_ones", "new_zeros", "new_empty", "eye"}
)
# Into how many parts, or of which size, unless the parts may be put together again in another order.
_PARTS = frozenset(
    {("split", 1), ("split", "split_size"), ("split", "split_size_or_sections"), ("chunk", 1), ("chunk", "chunks")}
)
_SHAPES = frozenset({(op, place) for op in ("layer_norm", "rms_norm") for place in (1, "normalized_shape")})
_TURNS = "rope"
# Their numbers say in which dimension something lies.
_PLACING = frozenset({"unsqueeze", "squeeze", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"})
_PLAIN = (bool, int, float, str)
_LEFT_OUT = "the default"  # torch's own functions pass on what their caller does not write
# Only in these a user writes numbers: what iterates over a tensor calls unbind.
_WRITTEN = (ast.Call, ast.BinOp, ast.Compare, ast.AugAssign, ast.Assign)


@dataclass(frozen=True)
class Known:
    """What an expression was in the recorded run, and must be for the new code."""

    expression: ast.expr
    text: str  # the test


def relied_on(match: Match, recording: Recording, texts: Texts, called: Callable[[str], str]) -> list[Known]:
    """The conditions under which ``match`` holds, asked in the function of ``texts``, each once.

    ``called`` gives a function of ``gradscope.recipes`` the name that it has in the file.

    Raises:
        Refusal: a number can be asked for neither there nor anywhere.
    """
    finder = _Finder(recording, texts)
    read = set(_read_anew(match.arguments))
    own = match.nodes | match.optional | match.later
    given_whole = {piece.node for piece in _pieces(match.arguments) if isinstance(piece, Given)}
    # What is handed on whole is called there as it is, whatever it is.
    handed_on = {piece.node for piece in _pieces(match.arguments) if isinstance(piece, Layer)}
    found: dict[str, Known] = {}
    fitting = {known.text for node in match.nodes if _meets_a_table(node, match) for known in finder.places(node)}
    for node in sorted(_calls(match), key=lambda node: node.index):
        if node in own and node not in handed_on:
            kind = finder.called(node)
            found |= {} if kind is None else {kind.text: kind}
            found |= {known.text: known for known in finder.on_the_way(node)}
        if node.caller is not None or node.op in _OF_FORM or node in given_whole:
            continue
        for known in finder.places(node) if node.op == "getitem" else ():
            if known.text not in fitting:
                found.setdefault(known.text, known)
        for scalar, value in _numbers(node):
            if _fits_or_raises(node, scalar, match):
                continue
            if (node, scalar.position) not in read and (node, scalar.name) not in read:
                asked = finder.known(scalar, value)
                if asked is not None:
                    found.setdefault(asked.text, asked)
        for value in _held(node, match, read):
            known = finder.held(value, node, called)
            found.setdefault(known.text, known)
    return list(found.values())


def _meets_a_table(node: Node, match: Match) -> bool:
    """Whether it shows the part that a rotation multiplies with a table: of another width it would not fit."""
    if match.recipe != _TURNS or node.op != "getitem":
        return False
    width = node.output.shape[-1:]
    products = [user for user in node.output.users if user.op == "mul" and user in match.nodes]
    return any(each.shape[-1:] == width and not each.requires_grad for user in products for each in user.inputs)


def _fits_or_raises(node: Node, scalar: Scalar, match: Match) -> bool:
    """Whether another number would not fit what the rest of the pattern makes of it."""
    place = {(node.op, scalar.position), (node.op, scalar.name)}
    if not place.isdisjoint(_PARTS):
        return match.recipe != _TURNS
    return not place.isdisjoint(_SHAPES) and len(node.inputs) > 1  # that of the weight


def _calls(match: Match) -> set[Node]:
    """Those of the pattern, those that made the numbers which it reads as tensors, and those that placed a table."""
    nodes = match.nodes | match.optional | match.later
    numbers = {value for node in nodes for value in node.inputs if _is_number(value) and value.producer not in nodes}
    placed = _placing(match) if match.recipe == _TURNS else set()
    return {*nodes, *placed, *(node for value in numbers - _operands(match) for node in makers(value))}


def _placing(match: Match) -> set[Node]:
    """The calls that gave the tables the dimensions by which tokens are told from heads."""
    found: set[Node] = set()
    for value in _operands(match):
        node = None if value.requires_grad else value.producer
        while node is not None and is_view(node):
            if node.op in _PLACING:
                found.add(node)
            node = node.inputs[0].producer
    return found


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
        if _is_plain(value) and (node.op, position) not in {("setitem", 1), ("getitem", 1)}:  # places
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
        return self._asked(found, value, texts, scalar.node.op in _ARITHMETIC)

    def places(self, node: Node) -> Iterator[Known]:
        """The conditions that an index shows the same part.

        Raises:
            Refusal: it is not written where it is used.
        """
        texts = self._texts_at(node)
        spelled = texts.spelled(node)
        if not isinstance(spelled, ast.Subscript):  # what iterates, or another function of torch's that indexes
            return
        index, value = _resolved(spelled.slice, texts.source), node.args[1]
        written = index.elts if isinstance(index, ast.Tuple) else [index]
        values = value if isinstance(value, tuple) else (value,)
        if len(written) != len(values) or any(isinstance(each, ast.Starred) for each in written):
            raise Refusal(f"line {index.lineno}: {texts.source.file.of(index)} may be another number next time")
        for part, held in _bounds(written, values):
            known = self._asked(part, held, texts, False)
            if known is not None:
                yield known

    def _asked(self, found: ast.expr, value: Any, texts: Texts, multiplies: bool) -> Known | None:
        expression = _resolved(found, texts.source)
        if _is_certain(expression, texts):
            return None
        text = self._text(expression, texts)
        if any(self.texts.source.file.bound[name] for name in ("isinstance", "float", "int")):
            raise Refusal(f"line {expression.lineno}: {text} may be another number next time")
        return Known(expression, _test(expression, text, value, multiplies))

    def called(self, node: Node) -> Known | None:
        """The condition that what is called is of the class that it was; None where it always is.

        Raises:
            Refusal: that can be told by no name of the file, or a function is called that may be another one.
        """
        texts = self._texts_at(node)
        if not isinstance(node.caller, nn.Module):
            check_named(node, texts)
            return None
        expression = configured(node, node.caller, texts)
        if expression is None:
            return None
        text, name = self._text(expression, texts), name_of(type(node.caller), self.frame.globals)
        if name is None:
            raise Refusal(f"line {expression.lineno}: {text} may be a module of another class next time")
        return Known(expression, f"type({text}) is {name}")

    def on_the_way(self, node: Node) -> Iterator[Known]:
        """The conditions that the user's own modules which were called for it are of the classes that they were.

        Raises:
            Refusal: it is called by another function than the one that is edited, which asks for nothing.
        """
        for inner, outer in pairwise(node.places):
            module = inner.frame.owner
            if inner.frame is self.frame:
                return
            if module is not None and module is outer.frame.owner:
                continue
            texts = self.texts if outer.frame is self.frame else self._texts_of(outer.frame, node)
            call = texts.source.at(outer.span)
            if module is None:
                check_helper(inner.frame, call, texts)
                continue
            expression = configured_on_the_way(inner.frame, module, call, texts)
            if expression is not None:
                text, kind = self._text(expression, texts), type(module)
                name = name_of(kind, self.frame.globals)
                # That a mapping of a library gave it, as Transformers' ACT2FN, leaves the file without its name.
                test = f'type({text}).__name__ == "{kind.__name__}"' if name is None else f"type({text}) is {name}"
                yield Known(expression, test)

    def held(self, value: Value, node: Node, called: Callable[[str], str]) -> Known:
        """The condition that a tensor is the number that it was, and gets no gradient."""
        texts = self._texts_at(node)
        expression, _ = texts.operand(value, frozenset({node}))
        text = self._text(expression, texts)
        return Known(expression, f"{called('is_number')}({text}, {_spelled(number(value), text, expression.lineno)})")

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


def _bounds(written: list[ast.expr], values: tuple[Any, ...]) -> Iterator[tuple[ast.expr, Any]]:
    """The expressions in an index that were numbers, and these; of a slice that is not written as one, it."""
    for part, value in zip(written, values, strict=True):
        if isinstance(part, ast.Slice) and isinstance(value, slice):
            ends = zip((part.lower, part.upper, part.step), (value.start, value.stop, value.step), strict=True)
            yield from ((end, held) for end, held in ends if end is not None)
        elif isinstance(value, (int, slice)):
            yield part, value


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
        if _is_of_math(expression, texts):
            return True
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
        certain = isinstance(function, ast.Name) and is_pure(function, texts.frame)
        if isinstance(function, ast.Attribute):
            pure = function.attr in _OF_NUMBERS and _of_module(function, texts)
            certain = pure or _is_form(function, _ASKED, texts)
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


def is_pure(name: ast.Name, frame: Frame) -> bool:
    """Whether a function that is called by its name gives the same number for the same ones, as ``float`` and ``sqrt``.

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


def _is_of_math(name: ast.Name, texts: Texts) -> bool:
    """``pi``, where the file has that from ``math`` and from nowhere else."""
    file = texts.source.file
    imports = (node for node in file.tree.body if isinstance(node, ast.ImportFrom) and node.module == "math")
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return name.id in names and file.bound[name.id] == 1


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
