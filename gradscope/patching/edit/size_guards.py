"""Sizes that are equal in the recorded step, and must be for the new code.

A mask that is made of one length alone is causal where there are as many keys as queries. Keys of a cache are more
another time: a mask of one row would be laid over all of them, and hide none. Logits may have more rows than targets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.ops import CASTS, CASTS_TO_ONE, COPIES, SCALES, names
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.constants import resolved
from gradscope.patching.edit.expressions import operand_of
from gradscope.patching.edit.guard_writer import bracketed
from gradscope.patching.edit.source import Refusal, SourceGuard
from gradscope.patching.edit.syntax import names_in, reads_only
from gradscope.patching.match.match import Match, Of
from gradscope.recording.graph import Node

# What gives as many rows as it reads, whatever the numbers beside the tensor are.
_ROW_BY_ROW = (
    CASTS
    | COPIES
    | names(
        "linear layer_norm rms_norm dropout mul div neg view reshape flatten unflatten transpose permute movedim mT T "
        "unsqueeze squeeze unbind detach"
    )
)
_ATTENDED = frozenset({"query", "key", "value"})
# Those that give parts of one dimension.
_PARTS = names("chunk split")


def guards_of_sizes(match: Match, calls: CallSites) -> Iterator[SourceGuard]:
    """Yield the guards that sizes are equal, and shapes and dtypes what they were, where a match relies on that.

    Raises:
        Refusal: they are those of no tensors of the function's own.
    """
    yield from _equal_lengths(match, calls)
    yield from _equal_rows(match, calls)
    yield from _equal_dtypes(match, calls)
    for value, test in match.forms:
        expression = operand_of(value, match.nodes, calls)[0]
        yield form_guard(expression, f"{_text(expression, calls)}{test}", calls)


def _equal_lengths(match: Match, calls: CallSites) -> Iterator[SourceGuard]:
    """Yield the guard that queries and keys are as many, once for each tensor asked; none where the source says so.

    Raises:
        Refusal: they are no tensors of the function's own.
    """
    if match.lengths is None:
        return
    asked = [(operand_of(value, match.nodes, calls)[0], dimension) for value, dimension in match.lengths]
    query, key = (_root(expression, calls) for expression, _ in asked)
    if query is not None and query == key:
        return
    sizes = [f"{_text(expression, calls)}.size({dimension})" for expression, dimension in asked]
    for expression, _ in asked:
        yield SourceGuard(expression, " == ".join(sizes))


def _equal_rows(match: Match, calls: CallSites) -> Iterator[SourceGuard]:
    """Yield the guard that two tensors have the same rows, once for each of them.

    Raises:
        Refusal: they are no tensors of the function's own.
    """
    if match.rows is not None:
        asked = [operand_of(value, match.nodes, calls)[0] for value in match.rows]
        rows, target = (_text(expression, calls) for expression in asked)
        wanted = (
            f"{rows}.shape[:-1]" if len(match.rows[0].shape) > len(match.rows[1].shape) else f"{rows}[..., :1].shape"
        )
        for expression in asked:
            yield form_guard(expression, f"{wanted} == {target}.shape", calls)


def _equal_dtypes(match: Match, calls: CallSites) -> Iterator[SourceGuard]:
    """Yield the guards that operands of attention have one dtype, where casts to a written one made some of them."""
    pieces = (piece for argument in match.arguments for piece in argument.pieces)
    values = {piece.role: piece.value for piece in pieces if isinstance(piece, Of) and piece.role in _ATTENDED}
    asked = [operand_of(value, match.nodes, calls)[0] for value in values.values()] if len(values) == 3 else []
    cast = [_is_cast_as_written(expression, calls) for expression in asked]
    if any(cast) and not all(cast):
        one, other = asked[cast.index(True)], asked[cast.index(False)]
        for expression in (one, other):
            yield form_guard(expression, f"{_text(one, calls)}.dtype == {_text(other, calls)}.dtype", calls)


def _is_cast_as_written(expression: ast.expr, calls: CallSites) -> bool:
    """Return whether it is ``x.float()`` or ``x.to(torch.float32)``, or a name that was bound to that."""
    homes = calls.source.assignments(expression) if isinstance(expression, ast.Name) else []
    for each in [home.value for home in homes] or [expression]:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            given = [part for part in each.args if isinstance(part, ast.Attribute) and part.attr != "dtype"]
            if each.func.attr in CASTS_TO_ONE or (each.func.attr in CASTS and given):
                return True
    return False


def _text(expression: ast.expr, calls: CallSites) -> str:
    return bracketed(expression, calls.source.file.of(expression))


def form_guard(expression: ast.expr, test: str, calls: CallSites) -> SourceGuard:
    if not reads_only(expression):
        name = calls.source.file.of(expression)
        raise Refusal(
            f"line {expression.lineno}: {name} may have a different shape in another call, and has no variable to check"
        )
    return SourceGuard(expression, test)


def _root(expression: ast.expr, calls: CallSites) -> tuple[str, ast.Assign | None] | None:
    """Return the name that an expression's rows are those of, and what bound it; None where that is not sure."""
    while True:
        name = _first(expression, calls)
        if not isinstance(name, ast.Name) or not _is_sure(name, calls):
            return None
        home = _home(name, calls)
        given = None if home is None else _given(home, name.id, calls)
        if given is None or not isinstance(_first(given, calls), ast.Name):
            return name.id, home
        expression = given


def _is_sure(name: ast.Name, calls: CallSites) -> bool:
    """Check that a name holds what was bound last above, in the same round of a loop."""
    source = calls.source
    homes = source.assignments(name)
    if not homes:
        return not any(isinstance(each.ctx, ast.Store) for each in source.names(name.id))
    block = source.block(source.statement(calls.expression(calls.last)))
    is_looped = any(source.inside(home, (ast.For, ast.AsyncFor, ast.While)) for home in homes)
    if _home(name, calls) is None:
        return name.id in source.arguments and not is_looped
    return not is_looped or all(home in block for home in homes)


def _home(name: ast.Name, calls: CallSites) -> ast.Assign | None:
    """Return the last assignment above, of those that stand in one block."""
    file = calls.source.file
    above = [home for home in calls.source.assignments(name) if file.end(home) <= file.start(name)]
    return max(above, key=file.start, default=None)


def _given(home: ast.Assign, name: str, calls: CallSites) -> ast.expr | None:
    """Return what an assignment gives a name: its part of ``q, k = self.q(x), self.k(x)``, or what is taken apart."""
    for target in home.targets:
        if isinstance(target, ast.Tuple) and isinstance(home.value, ast.Tuple):
            pairs = zip(target.elts, home.value.elts, strict=False)
            return next((value for each, value in pairs if names_in(each) == {name}), None)
    if isinstance(home.value, (ast.GeneratorExp, ast.ListComp)):
        return _of_each(home.value, calls)
    return home.value if all(isinstance(each, ast.Name) for each in home.targets) else _parts(home.value, calls)


def _of_each(made: ast.GeneratorExp | ast.ListComp, calls: CallSites) -> ast.expr | None:
    """Return what ``(each.view(...) for each in parts)`` is taken from, where every part keeps its rows."""
    loop, part = made.generators[0], made.elt
    while (
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _ROW_BY_ROW - SCALES
    ):
        part = part.func.value
    if len(made.generators) > 1 or not isinstance(part, ast.Name) or names_in(loop.target) != {part.id}:
        return None
    return _parts(loop.iter, calls) if isinstance(loop.target, ast.Name) else None


def _parts(whole: ast.expr, calls: CallSites) -> ast.expr | None:
    """Return what holds parts of a tensor that have as many rows each; None for another container."""
    if isinstance(whole, ast.Name) and not calls.is_tensor(whole):
        home = _home(whole, calls)
        if home is None or not _is_sure(whole, calls) or not all(isinstance(each, ast.Name) for each in home.targets):
            return None  # ``*rest`` is a list, whose parts may be put in anew
        whole = home.value
    node = _made(whole, calls)
    is_tensor = isinstance(whole, ast.Name) and calls.is_tensor(whole)
    return whole if is_tensor or (node is not None and node.op in _PARTS | {"unbind"}) else None


def _first(expression: ast.expr | None, calls: CallSites) -> ast.expr | None:
    """Return what the rows of an expression are those of: back over calls that keep them, to a name if there is one."""
    while expression is not None and not isinstance(expression, ast.Name):
        expression = _below(expression, calls)
    return expression


def _below(expression: ast.expr, calls: CallSites) -> ast.expr | None:
    """Return what one call reads that keeps the rows; None where that is not sure."""
    node = _made(expression, calls)
    if node is None and isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return _parts(expression.value, calls)
    if node is None or not _keeps_rows(node, expression):
        return None
    if node.op in SCALES:
        return _scaled(expression, node, calls)
    if isinstance(expression, (ast.Attribute, ast.Subscript)):
        return expression.value
    if not isinstance(expression, ast.Call):
        return None
    function = expression.func
    if isinstance(function, ast.Attribute) and calls.is_tensor(function.value):
        return function.value
    return expression.args[0] if expression.args else None


def _made(expression: ast.expr, calls: CallSites) -> Node | None:
    """Return the call of torch's that stands there itself; None where it was not recorded, or a function makes it."""
    found = [node for part, node in calls.calls_in(calls.source.statement(expression)) if part is expression]
    return found[-1] if found and found[-1].places[0].frame is calls.frame else None


def _scaled(expression: ast.expr, node: Node, calls: CallSites) -> ast.expr | None:
    """Return the factor that has rows, where the other is a number and no row of them another time."""
    if isinstance(expression, ast.BinOp):
        sides = [expression.left, expression.right]
    elif isinstance(expression, ast.Call):
        sides = [*(each.value for each in (expression.func,) if isinstance(each, ast.Attribute)), *expression.args]
    else:
        return None
    (value,) = (each for each in node.inputs if each.shape)
    found = next((side for side in sides if calls.denotes(side, value, node)), None)
    others = [resolved(side, calls.source) for side in sides if side is not found]
    locals_ = calls.frame.code.co_varnames
    may_differ = any(
        isinstance(each, ast.IfExp) or (isinstance(each, ast.Name) and each.id in locals_) for each in others
    )
    return None if may_differ else found


def _keeps_rows(node: Node, expression: ast.expr) -> bool:
    if node.op in SCALES:
        return sum(bool(each.shape) for each in node.inputs) == 1
    if node.op in _PARTS:
        last = len(node.inputs[0].shape) - 1
        given = [*node.args[2:3], *(node.kwargs[name] for name in ("dim",) if name in node.kwargs)]
        return given in ([-1], [last])
    if node.op == "getitem" and isinstance(expression, ast.Subscript):
        return _shows_rows(node, expression.slice)
    return node.op in _ROW_BY_ROW


def _shows_rows(node: Node, index: ast.expr) -> bool:
    """Return whether an index is written that picks one of several, or a part of the last dimension."""
    *before, last = index.elts if isinstance(index, ast.Tuple) else [index]
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    ends_last = Ellipsis in parts or len(parts) == len(node.inputs[0].shape)
    whole = before if isinstance(last, ast.Slice) and ends_last else [*before, last]
    return all(isinstance(each, ast.Constant) or ast.unparse(each) == ":" for each in whole)
