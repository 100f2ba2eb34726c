"""Sizes that are equal in the recorded step, and must be for the new code.

A mask that is made of one length alone is causal where there are as many keys as queries. Keys of a cache are more
another time: a mask of one row would be laid over all of them, and hide none. Logits may have more rows than targets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.ops import names
from gradscope.patching.conditions import Known
from gradscope.patching.graph import CASTS, COPIES
from gradscope.patching.match import Match
from gradscope.patching.reading import reads_only
from gradscope.patching.recording import Node
from gradscope.patching.refusal import Refusal
from gradscope.patching.syntax import names_in
from gradscope.patching.texts import Texts

# What gives as many rows as it reads, whatever the numbers beside the tensor are.
_ROW_BY_ROW = (
    CASTS
    | COPIES
    | names(
        "linear layer_norm rms_norm dropout mul div neg view reshape flatten unflatten transpose permute movedim mT T "
        "unsqueeze squeeze unbind detach"
    )
)
# Those that give parts of one dimension.
_PARTS = names("chunk split")


def equal_lengths(match: Match, texts: Texts) -> Iterator[Known]:
    """The condition, once for what it asks of either; none where the source says so.

    Raises:
        Refusal: they are no tensors of the function's own.
    """
    if match.lengths is None:
        return
    asked = [(texts.operand(value, match.nodes)[0], dimension) for value, dimension in match.lengths]
    query, key = (_root(expression, texts) for expression, _ in asked)
    if query is not None and query == key:
        return
    sizes = [f"{texts.source.file.of(expression)}.size({dimension})" for expression, dimension in asked]
    for expression, _ in asked:
        yield Known(expression, " == ".join(sizes))


def equal_rows(match: Match, texts: Texts) -> Iterator[Known]:
    """The condition, once for either tensor.

    Raises:
        Refusal: they are no tensors of the function's own.
    """
    if match.rows is not None:
        asked = [texts.operand(value, match.nodes)[0] for value in match.rows]
        rows, target = (texts.source.file.of(expression) for expression in asked)
        wanted = (
            f"{rows}.shape[:-1]" if len(match.rows[0].shape) > len(match.rows[1].shape) else f"{rows}[..., :1].shape"
        )
        for expression in asked:
            if not reads_only(expression):
                name = texts.source.file.of(expression)
                raise Refusal(f"line {expression.lineno}: {name} may have other rows next time, and has no name to ask")
            yield Known(expression, f"{wanted} == {target}.shape")


def _root(expression: ast.expr, texts: Texts) -> str | None:
    """The name that an expression's rows are those of, on every way through the function; None where none is sure."""
    seen: set[str] = set()
    roots: set[str | None] = set()
    left = [expression]
    while left:
        name = _first(left.pop(), texts)
        if not isinstance(name, ast.Name):
            return None
        if name.id in seen:
            continue
        seen.add(name.id)
        stored = any(isinstance(each.ctx, ast.Store) for each in texts.source.names(name.id))
        homes = texts.source.assignments(name)
        if stored and not homes:
            return None
        given = [_given(home, name.id, texts) for home in homes]
        follow = [each for each in given if each is not None and isinstance(_first(each, texts), ast.Name)]
        if len(follow) < len(given) and (len(given) > 1 or name.id in texts.source.arguments):
            return None
        left += follow
        roots |= {name.id} if not follow or name.id in texts.source.arguments else set()
    return roots.pop() if len(roots) == 1 else None


def _given(home: ast.Assign, name: str, texts: Texts) -> ast.expr | None:
    """What an assignment gives a name: its part of ``q, k = self.q(x), self.k(x)``, or what is taken apart."""
    for target in home.targets:
        if isinstance(target, ast.Tuple) and isinstance(home.value, ast.Tuple):
            pairs = zip(target.elts, home.value.elts, strict=False)
            return next((value for each, value in pairs if names_in(each) == {name}), None)
    if isinstance(home.value, (ast.GeneratorExp, ast.ListComp)):
        return _of_each(home.value, texts)
    return home.value if all(isinstance(each, ast.Name) for each in home.targets) else _parts(home.value, texts)


def _of_each(made: ast.GeneratorExp | ast.ListComp, texts: Texts) -> ast.expr | None:
    """What ``(each.view(...) for each in parts)`` is taken from, where every part keeps its rows."""
    loop, part = made.generators[0], made.elt
    while (
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in _ROW_BY_ROW - {"mul", "div"}
    ):
        part = part.func.value
    if len(made.generators) > 1 or loop.ifs or not isinstance(part, ast.Name) or names_in(loop.target) != {part.id}:
        return None
    return _parts(loop.iter, texts) if isinstance(loop.target, ast.Name) else None


def _parts(whole: ast.expr, texts: Texts) -> ast.expr | None:
    """What holds parts of a tensor that have as many rows each; None for another container."""
    if isinstance(whole, ast.Name) and not texts.is_tensor(whole):
        homes = texts.source.assignments(whole)
        whole = homes[0].value if len(homes) == 1 else whole
    node = _made(whole, texts)
    is_tensor = isinstance(whole, ast.Name) and texts.is_tensor(whole)
    return whole if is_tensor or (node is not None and node.op in _PARTS | {"unbind"}) else None


def _first(expression: ast.expr | None, texts: Texts) -> ast.expr | None:
    """What the rows of an expression are those of: back over calls that keep them, to a name where there is one."""
    while expression is not None and not isinstance(expression, ast.Name):
        expression = _below(expression, texts)
    return expression


def _below(expression: ast.expr, texts: Texts) -> ast.expr | None:
    """What one call reads that keeps the rows; None where that is not sure."""
    node = _made(expression, texts)
    if node is None and isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return _parts(expression.value, texts)
    if node is None or not _keeps_rows(node, expression):
        return None
    if isinstance(expression, ast.BinOp):
        return _factor(expression, node, texts)
    if isinstance(expression, (ast.Attribute, ast.Subscript)):
        return expression.value
    if not isinstance(expression, ast.Call):
        return None
    function = expression.func
    if isinstance(function, ast.Attribute) and texts.is_tensor(function.value):
        return function.value
    return expression.args[0] if expression.args else None


def _made(expression: ast.expr, texts: Texts) -> Node | None:
    """The call of torch's that stands there itself; None where it was not recorded, or a function makes it."""
    found = [node for part, node in texts.calls_in(texts.source.statement(expression)) if part is expression]
    return found[-1] if found and found[-1].places[0].frame is texts.frame else None


def _factor(expression: ast.BinOp, node: Node, texts: Texts) -> ast.expr | None:
    (value,) = (each for each in node.inputs if each.shape)
    sides = (expression.left, expression.right)
    return next((side for side in sides if texts.denotes(side, value, node)), None)


def _keeps_rows(node: Node, expression: ast.expr) -> bool:
    if node.op in {"mul", "div"}:
        return sum(bool(each.shape) for each in node.inputs) == 1
    if node.op in _PARTS:
        last = len(node.inputs[0].shape) - 1
        given = [*node.args[2:3], *(node.kwargs[name] for name in ("dim",) if name in node.kwargs)]
        return given in ([-1], [last])
    if node.op == "getitem" and isinstance(expression, ast.Subscript):
        return _shows_rows(node, expression.slice)
    return node.op in _ROW_BY_ROW


def _shows_rows(node: Node, index: ast.expr) -> bool:
    """Whether an index is written that picks one of several, or a part of the last dimension."""
    *before, last = index.elts if isinstance(index, ast.Tuple) else [index]
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    ends_last = Ellipsis in parts or len(parts) == len(node.inputs[0].shape)
    whole = before if isinstance(last, ast.Slice) and ends_last else [*before, last]
    return all(isinstance(each, ast.Constant) or ast.unparse(each) == ":" for each in whole)
