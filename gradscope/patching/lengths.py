"""Whether there are always as many keys as queries, as a mask that is made of one length alone is causal for.

Keys of a cache are more another time: a mask of one row would be laid over all of them, and hide none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradscope.patching.conditions import Known
from gradscope.patching.match import Match
from gradscope.patching.recording import Node, Value
from gradscope.patching.syntax import walked
from gradscope.patching.texts import Texts


def equal_lengths(match: Match, texts: Texts) -> Iterator[Known]:
    """The condition, once for what it asks of either; none where the source says so.

    Raises:
        Refusal: they are no tensors of the function's own.
    """
    if match.lengths is None:
        return
    asked = [(*texts.operand(value, match.nodes), value, dimension) for value, dimension in match.lengths]
    (query, _, one, _), (key, _, other, _) = asked
    if _from_one(one, other, texts) and _are_settled([query, key], match, texts):
        return
    sizes = [f"{texts.source.file.of(expression)}.size({dimension})" for expression, _, _, dimension in asked]
    for expression in (query, key):
        yield Known(expression, " == ".join(sizes))


def _from_one(one: Value, other: Value, texts: Texts) -> bool:
    """Whether both come from one tensor, row by row, by calls under the function."""
    mine, theirs = (list(_origins(value, texts)) for value in (one, other))
    return not set(mine).isdisjoint(theirs)


def _origins(value: Value, texts: Texts) -> Iterator[Value]:
    yield value
    while (node := value.producer) is not None and node.inputs and node.place_in(texts.frame) is not None:
        if node.op == "getitem" and not _keeps_rows(node):
            return
        value = node.inputs[0]
        yield value


def _keeps_rows(node: Node) -> bool:
    """Whether an index picks one of several, or a part of the last dimension."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    *before, last = index
    ends_last = Ellipsis in before or len(index) == len(node.inputs[0].shape)
    parts = before if isinstance(last, slice) and ends_last else index
    return all(part is None or part is Ellipsis or isinstance(part, int) or part == slice(None) for part in parts)


def _are_settled(expressions: list[ast.expr], match: Match, texts: Texts) -> bool:
    """Whether all tensors' names on the way are bound in one way, each time by a call that was recorded."""
    source, last = texts.source, match.last.place_in(texts.frame)
    tensors = frozenset[str]() if last is None else last.names.keys()
    seen: set[str] = set()
    left: list[ast.AST] = [*expressions]
    while left:
        for name in (part for part in walked(left.pop()) if isinstance(part, ast.Name)):
            stored = any(isinstance(each.ctx, ast.Store) for each in source.names(name.id))
            if name.id in seen or not stored or name.id not in tensors:
                continue
            seen.add(name.id)
            homes = source.assignments(name)
            if not homes or not all(_ran(home, texts) for home in homes):
                return False
            left += [home.value for home in homes]
    return True


def _ran(home: ast.Assign, texts: Texts) -> bool:
    """Whether a tensor was made there, where anything is called: a cache may do nothing at first."""
    if not any(isinstance(part, ast.Call) for part in walked(home.value)):
        return True
    lines = range(home.lineno, (home.end_lineno or 0) + 1)
    places = (node.place_in(texts.frame) for node in texts.nodes)
    return any(place is not None and place.span is not None and place.span.line in lines for place in places)
