"""Numbers that a proof relied on: written down, of a tensor's form, or asked again at each call.

A match holds for the numbers of the recorded run. Those that the new code reads itself may change, and so may the sizes
of a view, which fit or raise. Any other that is no literal becomes a condition, with the old code behind it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from gradscope.ops import RESHAPES_TO_SIZES
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.constants import is_certain, resolved
from gradscope.patching.edit.expressions import is_left, operand_of, size_of, sizes_of
from gradscope.patching.edit.guard_writer import GuardWriter, bracketed
from gradscope.patching.edit.size_guards import form_guard
from gradscope.patching.edit.source import SourceGuard
from gradscope.patching.edit.syntax import called_name, reads_only
from gradscope.patching.match.graph import is_view, makers, number
from gradscope.patching.match.match import (
    Argument,
    FromSizes,
    Given,
    Layer,
    Match,
    Of,
    Piece,
    Scalar,
    Setting,
    Size,
)
from gradscope.recording.graph import Node, Recording, Value

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
_PICKS = "cross_entropy"  # its views show a vector, which fits another shape as well
_PACKED = "packed_attention"
_ONE_BY_ONE = frozenset({"gelu", "bias_gelu", "geglu", "swiglu"})  # how many features there are is nothing to these
_NORMS = frozenset({"rms_norm", "layer_norm", "add_norm"})
# Their numbers say in which dimension something lies.
_PLACING = frozenset({"unsqueeze", "squeeze", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"})
_PLAIN = (bool, int, float, str, type(None))
_LEFT_OUT = "the default"  # torch's own functions pass on what their caller does not write


def guards_of(match: Match, recording: Recording, calls: CallSites, called: Callable[[str], str]) -> list[SourceGuard]:
    """Return the guards under which ``match`` holds, asked in the function of ``calls``, each once.

    ``called`` gives a function of ``gradscope.recipes`` the name that it has in the file.

    Raises:
        Refusal: a number can be asked for neither there nor anywhere.
    """
    writer = GuardWriter(recording, calls)
    read = set(_read_anew(match.arguments))
    own = match.nodes | match.optional | match.later
    given_whole = {piece.node for piece in _pieces(match.arguments) if isinstance(piece, Given)}
    # What is handed on whole is called there as it is, whatever it is.
    handed_on = {piece.node for piece in _pieces(match.arguments) if isinstance(piece, Layer)}
    counted = _operands(match) if _says_how_many_features(match) else set()
    found: dict[str, SourceGuard] = {}
    if match.recipe == _PACKED:
        found |= {guard.test: guard for guard in guards_of_views(match.nodes, _packed(match), writer)}
    fitting = _tests_of_both_sides(match, writer) if match.recipe == _TURNS else set()
    for node in sorted(_calls_with_numbers(match), key=lambda node: node.index):
        if node in own and node not in handed_on:
            kind = writer.of_class(node)
            found |= {} if kind is None else {kind.test: kind}
            found |= {guard.test: guard for guard in writer.of_settings(node, settings_read(match, node.caller))}
            found |= {guard.test: guard for guard in writer.of_helpers(node)}
        found |= {guard.test: guard for guard in _guard_of_width(node, match, writer)}
        of_form = node.op in _OF_FORM and match.recipe != _PICKS
        if node.caller is not None or of_form or node in given_whole:
            continue
        for guard in writer.of_index(node) if node.op in {"getitem", "setitem"} else ():
            if guard.test not in fitting:
                found.setdefault(guard.test, guard)
        for scalar, value in _numbers(node):
            if _fits_or_raises(node, scalar, match, writer):
                continue
            # a keyword's position is none: "max" of clamp(min=1, max=m) does not stand where "min" may
            if (node, scalar.name or scalar.position) not in read:
                asked = writer.of_number(scalar, value, counted)
                if asked is not None:
                    found.setdefault(asked.test, asked)
        for value in _unread_buffers(node, match, read):
            guard = writer.of_buffer(value, node, called)
            found.setdefault(guard.test, guard)
    return list(found.values())


def _says_how_many_features(match: Match) -> bool:
    """Return whether a size of the features is what it was, or is said to be: a norm has a weight then.

    Without, it was proved for any, with the numbers as they were: another size may be cancelled by ``24``.
    """
    if match.recipe not in _NORMS:
        return match.recipe not in _ONE_BY_ONE
    vectors = any(each.name in {"weight", "bias"} for each in match.arguments)
    return vectors or any(test.startswith(".size(-1) ==") for _, test in match.forms)


def _tests_of_both_sides(match: Match, writer: GuardWriter) -> set[str]:
    """Return the tests of where a tensor is cut in two, one part of which meets a table that another cut would not fit.

    Of a part that is cut elsewhere than where the other begins one column may be left, which every table fits.
    """
    met: set[str] = set()
    sides: set[tuple[str, bool]] = set()
    for node in match.nodes:
        part = _end_shown(node) if node.op == "getitem" else None
        places = list(writer.of_index(node)) if part is not None else []
        if part is not None and len(places) == 1:  # two may change together
            sides.add((places[0].test, bool(part.start)))
            met |= {places[0].test} if _meets_a_table(node, match) else set()
    return {text for text in met if {(text, False), (text, True)} <= sides}


def _meets_a_table(node: Node, match: Match) -> bool:
    """Return whether it shows the part that a rotation multiplies with a table: of another width it would not fit."""
    width = node.output.shape[-1:]
    products = [user for user in node.output.users if user.op == "mul" and user in match.nodes]
    return any(each.shape[-1:] == width and not each.requires_grad for user in products for each in user.inputs)


def _end_shown(node: Node) -> slice | None:
    """Return the slice of the last dimension that an index shows; None of any other index."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    *before, last = index
    others = [each for each in before if each is not Ellipsis and each != slice(None)]
    is_last = Ellipsis in before or len(index) == len(node.inputs[0].shape)
    return last if not others and is_last and isinstance(last, slice) and last.step in {None, 1} else None


def _guard_of_width(node: Node, match: Match, writer: GuardWriter) -> Iterator[SourceGuard]:
    """Yield the guard that a call parts a tensor into as many, where not all of them would be read."""
    if _may_leave_some(node, match, writer):
        width = writer.of_width(node)
        yield from () if width is None else (width,)


def _may_leave_some(node: Node, match: Match, writer: GuardWriter) -> bool:
    """Return whether parts of a wider tensor would be read as they are, and its rest by nobody."""
    if node.op == "getitem":
        return match.recipe == "swiglu"  # one half begins where the other ends
    others = {_TURNS, _PACKED}  # what a packed attention's cuts rely on is told by its views
    return node.op == "split" and match.recipe not in others and not writer.names_all_parts(node)


def _fits_or_raises(node: Node, scalar: Scalar, match: Match, writer: GuardWriter) -> bool:
    """Return whether another number would not fit what the rest of the pattern makes of it."""
    place = {(node.op, scalar.position), (node.op, scalar.name)}
    if not place.isdisjoint(_PARTS):
        if match.recipe == _TURNS or not writer.names_all_parts(node):
            return False
        if node.op == "split" and match.recipe == "swiglu":
            return False  # parts of which one has one feature are multiplied, too
        return node.op != "split" or match.recipe != _PACKED or _cuts_surely(match, writer)
    return not place.isdisjoint(_SHAPES) and len(node.inputs) > 1  # that of the weight


def _cuts_surely(match: Match, writer: GuardWriter) -> bool:
    return are_sure_cuts(match.nodes, _packed(match), writer)


def _packed(match: Match) -> Value:
    """Return what queries, keys and values are parts of."""
    return next(piece.value for piece in _pieces(match.arguments[:1]) if isinstance(piece, Of))


def _calls_with_numbers(match: Match) -> set[Node]:
    """Return the calls of the pattern, those that made numbers it reads as tensors, and those that placed a table."""
    nodes = match.nodes | match.optional | match.later
    numbers = {value for node in nodes for value in node.inputs if _is_number(value) and value.producer not in nodes}
    placed = _calls_placing_tables(match) if match.recipe == _TURNS else set()
    return {*nodes, *placed, *(node for value in numbers - _operands(match) for node in makers(value))}


def _calls_placing_tables(match: Match) -> set[Node]:
    """Return the calls that gave the tables the dimensions by which tokens are told from heads."""
    found: set[Node] = set()
    for value in _operands(match):
        node = None if value.requires_grad else value.producer
        while node is not None and is_view(node):
            if node.op in _PLACING:
                found.add(node)
            node = node.inputs[0].producer
    return found


def _unread_buffers(node: Node, match: Match, read: set[tuple[Node, int | str]]) -> list[Value]:
    """Return tensors of one number that were there before, as buffers are, and that the new code does not read."""
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
    """Yield what of a call the new code reads itself, by position and by name."""
    for piece in _pieces(arguments):
        if isinstance(piece, Scalar) and not piece.asked:
            yield piece.node, piece.position
            if piece.name:
                yield piece.node, piece.name


def settings_read(match: Match, module: object) -> set[str]:
    """Return the attributes of a module of torch's that the new code reads."""
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


# What the calls around a packed attention rely on: sizes that fit another way another time, parts that nobody reads.
#
# The recipe takes the rows of the packed tensor as they are, and all features of each. So do views and splits of
# which every size is written, and those of rows are the tensor's own: another tensor they fit or raise. What is left
# to torch fits more.


_CUTS = frozenset({"split", "tensor_split", "narrow", "getitem"})  # a chunk is a third
_OF_PACKED = 3  # queries, keys and values


def guards_of_views(nodes: Collection[Node], root: Value, writer: GuardWriter) -> Iterator[SourceGuard]:
    """Yield the guards that ``nodes`` take all features of ``root`` for heads, and its rows for tokens.

    Raises:
        Refusal: a size that must be asked for is not written where it can be read.
    """
    for node in sorted(nodes, key=lambda node: node.index):
        if node.op in RESHAPES_TO_SIZES:
            yield from _guards_of_thirds(node, nodes, root, writer)
            yield from _guards_of_rows(node, nodes, root, writer)
    cuts = [node for node in nodes if _cuts_features(node, root)]
    if not are_sure_cuts(nodes, root, writer):
        by_name = all(map(writer.names_all_parts, cuts))  # then their numbers are asked for
        yield from _width_guards(nodes, root, writer, or_none=by_name)


def are_sure_cuts(nodes: Collection[Node], root: Value, writer: GuardWriter) -> bool:
    """Return whether what cuts out queries, keys and values raises for a tensor of another width."""
    cuts = [node for node in nodes if _cuts_features(node, root)]
    if not cuts:
        return True
    spelled = all(_is_spelled(part, nodes, writer) for node in cuts for part in node.outputs)
    return spelled and any(_reads_rest(node, writer) for node in cuts)


def _cuts_features(node: Node, root: Value) -> bool:
    """Return whether it gives runs of the features of ``root``, which are not thirds by themselves."""
    if node.op not in _CUTS or not node.outputs or node.inputs[0].shape != root.shape:
        return False
    part = node.output.shape
    in_thirds = node.op == "tensor_split" and isinstance(node.argument(1, "indices_or_sections"), int)
    return part[:-1] == root.shape[:-1] and part != root.shape and not in_thirds


def _reads_rest(node: Node, writer: GuardWriter) -> bool:
    """Return whether no features are left behind the last part."""
    if node.op == "getitem":
        last = node.args[1][-1] if isinstance(node.args[1], tuple) else node.args[1]
        return isinstance(last, slice) and last.stop is None
    return node.op != "narrow" and writer.names_all_parts(node)


def _is_spelled(part: Value, nodes: Collection[Node], writer: GuardWriter) -> bool:
    """Return whether a part is viewed as heads of which it is written how many they are, and how large."""
    views = [node for node in part.users if node in nodes and node.op in RESHAPES_TO_SIZES]
    written = [sizes_of(node, writer.calls_at(node)) for node in views]
    return any(sizes and not any(map(is_left, sizes)) for sizes in written)


def _guards_of_thirds(node: Node, nodes: Collection[Node], root: Value, writer: GuardWriter) -> Iterator[SourceGuard]:
    """Yield the guards that a view shows three parts where it did, which are picked one by one."""
    shape, width = node.output.shape, root.shape[-1]
    third = [
        place
        for place, size in enumerate(shape)
        if size == _OF_PACKED and math.prod(shape[place + 1 :]) == width // _OF_PACKED
    ]
    if node.inputs[0].shape[-1] != width or not third:  # of one part, or of all heads
        return
    calls = writer.calls_at(node)
    first, count = _sized_dimensions(node)
    expression = size_of(Size(node, third[0] - first, count, _OF_PACKED), calls)
    if expression is None:
        yield from _width_guards(nodes, root, writer)
        yield from _guards_of_numbers(node, writer)
    elif not isinstance(expression, ast.Constant):  # also what is made of another size
        yield SourceGuard(expression, f"{bracketed(expression, writer.text(expression, calls))} == {_OF_PACKED}")


def _guards_of_rows(node: Node, nodes: Collection[Node], root: Value, writer: GuardWriter) -> Iterator[SourceGuard]:
    """Yield the guards that the rows of a view are those of ``root``; none where the source says so."""
    calls, leading = writer.calls_at(node), _count_of_rows(node, root)
    sizes = sizes_of(node, calls) if leading else []
    if len(sizes) != len(node.output.shape) or any(isinstance(each, ast.Starred) for each in sizes):
        return
    rows, features = sizes[:leading], sizes[leading:]
    left = [is_left(each) for each in rows]
    if not all(is_left(each) or _is_of_rows(each, node, calls, writer) for each in rows):
        test = f".shape[1:] == {root.shape[1:]}" if left[0] else f".shape == {root.shape}"
        yield _packed_guard(nodes, root, writer, test)
    elif not any(left) or any(_reads_form(each, calls) for each in features):
        return
    else:
        yield from _width_guards(nodes, root, writer, or_none=True)
    yield from _guards_of_numbers(node, writer)


def _count_of_rows(node: Node, root: Value) -> int:
    """Return how many of a view's sizes count rows; 0 where others come before, or it is of features alone."""
    batch, tokens, _ = root.shape
    given, shown = node.inputs[0].shape, node.output.shape
    if node.op == "unflatten" or (given[:2] != (batch, tokens) and given[0] != batch * tokens):
        return 0
    return 2 if shown[:2] == (batch, tokens) else int(shown[0] == batch * tokens)


def _is_of_rows(size: ast.expr, node: Node, calls: CallSites, writer: GuardWriter) -> bool:
    """Return whether it is a size of a tensor or made of some, and of nothing else."""
    found, at = writer.as_handed(size, node, calls)
    if isinstance(found, ast.Call) and called_name(found) == "len":
        return at.is_tensor(found.args[0])
    return is_certain(found, at) and _reads_form(found, at)


def _reads_form(size: ast.expr, calls: CallSites, depth: int = 0) -> bool:
    """Return whether a number is made of a tensor's size, as ``C // self.heads`` is where ``B, T, C = x.shape``."""
    for part in ast.walk(resolved(size, calls.source)):
        if isinstance(part, ast.expr) and calls.is_tensor(part):
            return True
        homes = calls.source.assignments(part) if isinstance(part, ast.Name) and depth < _DEEPEST else []
        if any(_reads_form(home.value, calls, depth + 1) for home in homes):
            return True
    return False


def _guards_of_numbers(node: Node, writer: GuardWriter) -> Iterator[SourceGuard]:
    """Yield the guards that the sizes which a view was given are what they were."""
    calls, (first, _) = writer.calls_at(node), _sized_dimensions(node)
    for place, size in enumerate(sizes_of(node, calls), first):
        if not is_left(size):
            found, at = writer.as_handed(size, node, calls)
            guard = writer.of_value(found, node.output.shape[place], at, False)
            yield from () if guard is None else (guard,)


def _sized_dimensions(node: Node) -> tuple[int, int]:
    """Return the first dimension of a view's result that it was given a size for, and how many it was given."""
    if node.op != "unflatten":
        return 0, len(node.output.shape)
    before = len(node.inputs[0].shape)
    return node.argument(1, "dim") % before, 1 + len(node.output.shape) - before


def _width_guards(
    nodes: Collection[Node], root: Value, writer: GuardWriter, *, or_none: bool = False
) -> Iterator[SourceGuard]:
    """Yield the guard that the packed tensor is as wide as it was; ``or_none``: only where it has a name to ask.

    Of another width what is made of a layer's output, in rows or heads of the same sizes, fits nothing behind it.
    """
    whole, source = operand_of(root, frozenset(nodes), writer.calls)[0], writer.calls.source
    bound = [part for part in ast.walk(whole) if isinstance(part, ast.Name) and len(source.assignments(part)) > 1]
    if not or_none or (reads_only(whole) and not bound):
        yield _packed_guard(nodes, root, writer, f".size(-1) == {root.shape[-1]}")


def _packed_guard(nodes: Collection[Node], root: Value, writer: GuardWriter, test: str) -> SourceGuard:
    """Return the guard that the packed tensor passes ``test``."""
    calls = writer.calls
    expression = operand_of(root, frozenset(nodes), calls)[0]
    return form_guard(expression, f"{bracketed(expression, calls.source.file.of(expression))}{test}", calls)


_DEEPEST = 24
