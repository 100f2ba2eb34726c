"""Two spellings of one tensor among the calls of a match, of which one may be another tensor next time."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from gradscope.ops import CASTS, COPIES
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.source import Refusal
from gradscope.patching.edit.syntax import parts_read, walked, within
from gradscope.patching.match.graph import uncast
from gradscope.patching.match.match import Match
from gradscope.recording.graph import Node, Value

_CHOICES = (ast.IfExp, ast.BoolOp, ast.NamedExpr)
_GIVEN = (ast.Call, ast.Subscript, ast.Attribute, ast.Starred, ast.Await)
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)


def check_aliases(match: Match, calls: CallSites) -> None:
    """Raise Refusal where ``match`` reads a tensor by two spellings, and nothing says that they are one always.

    The new call reads it once: by ``h`` for both of ``h = x`` and ``g = u if self.flag else x``.
    """
    made = [calls.expression(node) for node in match.nodes]
    same: dict[Value, set[Value]] = {}  # a tensor, and what casts made of it
    for value in {value for node in match.nodes for value in node.inputs if value.producer not in match.nodes}:
        same.setdefault(uncast(value), set()).update(_casts(value))
    for values in same.values():
        nodes = match.nodes | {value.producer for value in values if value.producer is not None and len(values) > 1}
        reads = [read for value in values for read in _reads(value, nodes, calls)]
        spellings = {ast.unparse(read) for read in reads}
        first, last = (find(map(calls.source.file.start, reads), default=0) for find in (min, max))
        origins = {_origin(read, calls) for value in values for read in _reads(value, match.nodes, calls)}
        elsewhere = [read for value in values for read in _unseen(value, match.nodes, calls)]
        if len({*reads, *elsewhere}) > 1:
            _check_unseen(elsewhere, spellings, calls)
        for read in reads:
            chosen = isinstance(read, _CHOICES) and not any(within(read, each) for each in made)
            named = isinstance(read, ast.Name) and _is_chosen(read, calls, 0 if len(spellings) > 1 else first, last)
            if (chosen and len(spellings) > 1) or named or len(origins) > 1:
                text = calls.source.file.of(read)
                raise Refusal(
                    f"line {read.lineno}: {text} may be a different tensor than the rest of the pattern reads"
                )


def _casts(value: Value) -> Iterator[Value]:
    """Yield ``value`` and the tensors that casts made it of."""
    last = uncast(value)
    yield value
    while value is not last and value.producer is not None and value.producer.inputs:
        value = value.producer.inputs[0]
        yield value


def _reads(value: Value, nodes: Set[Node], calls: CallSites) -> Iterator[ast.expr]:
    """Yield where ``nodes`` read ``value`` in this function; of one of several tensors, the choice."""
    for node in nodes:
        if value not in node.inputs or node.place_in(calls.frame) is None:
            continue
        expression = calls.expression(node)
        found = [part for part in parts_read(expression) if calls.denotes(part, value, node)]
        yield from found or [part for part in walked(expression) if isinstance(part, _CHOICES)]


def _unseen(value: Value, nodes: Set[Node], calls: CallSites) -> Iterator[ast.expr]:
    """Yield the operands by which ``nodes`` may read ``value``, and that no recorded call and no name explains.

    ``hs[i]`` of a list and ``self.same(x)`` of an ``nn.Identity`` give a tensor that some other code has made.
    """
    for node in nodes:
        if value not in node.inputs or node.place_in(calls.frame) is None:
            continue
        expression = calls.expression(node)
        parts = list(parts_read(expression))
        found = [part for part in parts if calls.denotes(part, value, node)]
        if found and len(found) >= sum(each is value for each in node.inputs):
            continue
        for part in parts:
            if isinstance(part, _GIVEN) and not any(calls.denotes(part, each, node) for each in node.inputs):
                yield part


def _check_unseen(parts: list[ast.expr], spellings: Set[str], calls: CallSites) -> None:
    """Raise Refusal unless ``parts`` are one attribute under one spelling, and all that reads the tensor."""
    texts = {ast.unparse(part) for part in parts}
    if parts and (len(texts | spellings) > 1 or any(isinstance(part, ast.Call) for part in parts)):
        text = calls.source.file.of(parts[0])
        raise Refusal(f"line {parts[0].lineno}: {text} may be a different tensor than the rest of the pattern reads")


def _origin(read: ast.expr, calls: CallSites) -> tuple[str, int]:
    """Return the spelling that a tensor has before plain assignments and casts, and where that was bound.

    Of ``g = self.pick(x, u)``, two arguments or ``g, h = pair`` nothing says that they are one tensor next time too.
    """
    home, below = _bound(read, calls)
    while below is not None:
        read = below
        home, below = _bound(read, calls)
    return ast.unparse(read), 0 if home is None else calls.source.file.start(home)


def _bound(read: ast.expr, calls: CallSites) -> tuple[ast.Assign | None, ast.expr | None]:
    """Return the assignment that bound a name, and what the tensor was called before it or a cast."""
    if isinstance(read, ast.Call):
        function = read.func
        if isinstance(function, ast.Attribute) and function.attr in CASTS | COPIES and calls.is_tensor(function.value):
            return None, function.value
        return None, None
    if not isinstance(read, ast.Name):
        return None, None
    file = calls.source.file
    above = [home for home in calls.source.assignments(read) if file.end(home) <= file.start(read)]
    home = max(above, key=file.start, default=None)
    given = None if home is None else _given(home, read.id)
    is_other = isinstance(given, (ast.Name, ast.Attribute, ast.Subscript)) and calls.is_tensor(given)
    return home, given if given is not None and (is_other or _bound(given, calls)[1] is not None) else None


def _given(home: ast.Assign, name: str) -> ast.expr | None:
    """Return what an assignment gives a name: all of its value, or its part of ``h, g = x, x``."""
    for target in home.targets:
        if isinstance(target, ast.Name) and target.id == name:
            return home.value
        if isinstance(target, ast.Tuple) and isinstance(home.value, ast.Tuple):
            pairs = zip(target.elts, home.value.elts, strict=False)
            return next((value for each, value in pairs if isinstance(each, ast.Name) and each.id == name), None)
    return None


def _is_chosen(read: ast.Name, calls: CallSites, after: int, before: int) -> bool:
    """Return whether something between two places binds the name under a condition, or to one of several tensors."""
    source = calls.source
    for name in source.names(read.id):
        if not isinstance(name.ctx, ast.Store) or not after <= source.file.start(name) < before:
            continue
        home = source.statement(name)
        value = getattr(home, "value", None)
        above: ast.AST = home
        while above is not source.definition:
            above = source.file.parents[above]
            if isinstance(above, _BRANCHES) and not within(above, read):
                return True
        if isinstance(value, _CHOICES):
            return True
    return False
