"""What the calls around a packed attention rely on: sizes that fit another way another time, parts that nobody reads.

The recipe takes the rows of the packed tensor as they are, and all features of each. So do views and splits of which
every size is written, and those of rows are the tensor's own: another tensor they fit or raise. What is left to torch
fits more.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.constants import is_certain, resolved
from gradscope.patching.edit.expressions import is_left, operand_of, size_of, sizes_of
from gradscope.patching.edit.guard_tests import Conditions, bracketed
from gradscope.patching.edit.replacement import Known
from gradscope.patching.edit.size_guards import form_asked
from gradscope.patching.edit.syntax import called_name, reads_only
from gradscope.patching.match import Size
from gradscope.recording.graph import Node, Value

_RESHAPES = frozenset({"view", "reshape", "unflatten"})
_CUTS = frozenset({"split", "tensor_split", "narrow", "getitem"})  # a chunk is a third
_OF_PACKED = 3  # queries, keys and values


def known_views(nodes: Collection[Node], root: Value, conditions: Conditions) -> Iterator[Known]:
    """The conditions under which ``nodes`` take all features of ``root`` for heads, and its rows for tokens.

    Raises:
        Refusal: a size that must be asked for is not written where it can be read.
    """
    for node in sorted(nodes, key=lambda node: node.index):
        if node.op in _RESHAPES:
            yield from _parts(node, nodes, root, conditions)
            yield from _rows(node, nodes, root, conditions)
    cuts = [node for node in nodes if _cuts(node, root)]
    if not are_sure_cuts(nodes, root, conditions):
        by_name = all(map(conditions.names_all_parts, cuts))  # then their numbers are asked for
        yield from _width(nodes, root, conditions, or_none=by_name)


def are_sure_cuts(nodes: Collection[Node], root: Value, conditions: Conditions) -> bool:
    """Return whether what cuts out queries, keys and values raises for a tensor of another width."""
    cuts = [node for node in nodes if _cuts(node, root)]
    if not cuts:
        return True
    spelled = all(_is_spelled(part, nodes, conditions) for node in cuts for part in node.outputs)
    return spelled and any(_reads_rest(node, conditions) for node in cuts)


def _cuts(node: Node, root: Value) -> bool:
    """Return whether it gives runs of the features of ``root``, which are not thirds by themselves."""
    if node.op not in _CUTS or not node.outputs or node.inputs[0].shape != root.shape:
        return False
    part = node.output.shape
    in_thirds = node.op == "tensor_split" and isinstance(node.argument(1, "indices_or_sections"), int)
    return part[:-1] == root.shape[:-1] and part != root.shape and not in_thirds


def _reads_rest(node: Node, conditions: Conditions) -> bool:
    """Return whether no features are left behind the last part."""
    if node.op == "getitem":
        last = node.args[1][-1] if isinstance(node.args[1], tuple) else node.args[1]
        return isinstance(last, slice) and last.stop is None
    return node.op != "narrow" and conditions.names_all_parts(node)


def _is_spelled(part: Value, nodes: Collection[Node], conditions: Conditions) -> bool:
    """Return whether a part is viewed as heads of which it is written how many they are, and how large."""
    views = [node for node in part.users if node in nodes and node.op in _RESHAPES]
    written = [sizes_of(node, conditions.calls_at(node)) for node in views]
    return any(sizes and not any(map(is_left, sizes)) for sizes in written)


def _parts(node: Node, nodes: Collection[Node], root: Value, conditions: Conditions) -> Iterator[Known]:
    """The conditions that a view shows three parts where it did, which are picked one by one."""
    shape, width = node.output.shape, root.shape[-1]
    third = [
        place
        for place, size in enumerate(shape)
        if size == _OF_PACKED and math.prod(shape[place + 1 :]) == width // _OF_PACKED
    ]
    if node.inputs[0].shape[-1] != width or not third:  # of one part, or of all heads
        return
    calls = conditions.calls_at(node)
    first, count = _places(node)
    expression = size_of(Size(node, third[0] - first, count, _OF_PACKED), calls)
    if expression is None:
        yield from _width(nodes, root, conditions)
        yield from _numbers(node, conditions)
    elif not isinstance(expression, ast.Constant):  # also what is made of another size
        yield Known(expression, f"{bracketed(expression, conditions.text(expression, calls))} == {_OF_PACKED}")


def _rows(node: Node, nodes: Collection[Node], root: Value, conditions: Conditions) -> Iterator[Known]:
    """The conditions that the rows of a view are those of ``root``; none where the source says so."""
    calls, leading = conditions.calls_at(node), _leading(node, root)
    sizes = sizes_of(node, calls) if leading else []
    if len(sizes) != len(node.output.shape) or any(isinstance(each, ast.Starred) for each in sizes):
        return
    rows, features = sizes[:leading], sizes[leading:]
    left = [is_left(each) for each in rows]
    if not all(is_left(each) or _is_of_rows(each, node, calls, conditions) for each in rows):
        test = f".shape[1:] == {root.shape[1:]}" if left[0] else f".shape == {root.shape}"
        yield _form(nodes, root, conditions, test)
    elif not any(left) or any(_reads_form(each, calls) for each in features):
        return
    else:
        yield from _width(nodes, root, conditions, or_none=True)
    yield from _numbers(node, conditions)


def _leading(node: Node, root: Value) -> int:
    """How many of a view's sizes say which row it is; 0 where others come before, or it is of features alone."""
    batch, tokens, _ = root.shape
    given, shown = node.inputs[0].shape, node.output.shape
    if node.op == "unflatten" or (given[:2] != (batch, tokens) and given[0] != batch * tokens):
        return 0
    return 2 if shown[:2] == (batch, tokens) else int(shown[0] == batch * tokens)


def _is_of_rows(size: ast.expr, node: Node, calls: CallSites, conditions: Conditions) -> bool:
    """Return whether it is a size of a tensor or made of some, and of nothing else."""
    found, at = conditions.outside(size, node, calls)
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


def _numbers(node: Node, conditions: Conditions) -> Iterator[Known]:
    """The conditions that the sizes which a view was given are what they were."""
    calls, (first, _) = conditions.calls_at(node), _places(node)
    for place, size in enumerate(sizes_of(node, calls), first):
        if not is_left(size):
            found, at = conditions.outside(size, node, calls)
            known = conditions.asked(found, node.output.shape[place], at, False)
            yield from () if known is None else (known,)


def _places(node: Node) -> tuple[int, int]:
    """The first dimension of its result for which a view was given a size, and for how many it was."""
    if node.op != "unflatten":
        return 0, len(node.output.shape)
    before = len(node.inputs[0].shape)
    return node.argument(1, "dim") % before, 1 + len(node.output.shape) - before


def _width(nodes: Collection[Node], root: Value, conditions: Conditions, *, or_none: bool = False) -> Iterator[Known]:
    """The condition that the packed tensor is as wide as it was; ``or_none``: where it has a name to ask.

    Of another width what is made of a layer's output, in rows or heads of the same sizes, fits nothing behind it.
    """
    whole, source = operand_of(root, frozenset(nodes), conditions.calls)[0], conditions.calls.source
    bound = [part for part in ast.walk(whole) if isinstance(part, ast.Name) and len(source.assignments(part)) > 1]
    if not or_none or (reads_only(whole) and not bound):
        yield _form(nodes, root, conditions, f".size(-1) == {root.shape[-1]}")


def _form(nodes: Collection[Node], root: Value, conditions: Conditions, test: str) -> Known:
    """What is asked of the packed tensor."""
    calls = conditions.calls
    expression = operand_of(root, frozenset(nodes), calls)[0]
    return form_asked(expression, f"{bracketed(expression, calls.source.file.of(expression))}{test}", calls)


_DEEPEST = 24
