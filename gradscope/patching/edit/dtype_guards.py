"""The dtype of a result that casts by name: equal to the input's in the recorded step, and another once that changes.

With ``h = x.float()``, ``(h * ...).to(x.dtype)`` has the dtype of ``x`` whatever that is. ``.to(torch.float32)`` gives
float32, which a recipe's result has while ``x`` has, and no longer once the model is made half.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradscope.ops import CASTS
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.constants import resolved
from gradscope.patching.edit.expressions import handed, operand_of
from gradscope.patching.edit.guard_writer import bracketed
from gradscope.patching.edit.size_guards import form_guard
from gradscope.patching.edit.source import FunctionSource, Refusal, SourceGuard
from gradscope.patching.edit.syntax import reads_only, within
from gradscope.patching.match.match import Match, Of
from gradscope.recording.graph import Node, Value

# Their result has the dtype of the first operand.
_OF_OPERANDS = frozenset({"gelu", "bias_gelu", "geglu", "swiglu", "rms_norm", "layer_norm"})
# Theirs is what torch promotes the operands' dtypes to.
_PROMOTING = frozenset({"geglu", "swiglu"})
_X, _OWN = "x", "own"  # the dtype of the main operand; one of its own


def guards_of_dtypes(match: Match, calls: CallSites) -> Iterator[SourceGuard]:
    """Yield the guards that the dtypes which casts of the pattern name are the main operand's.

    Raises:
        Refusal: that is no tensor of the function's own that can be asked.
    """
    read = {value.producer for node in match.nodes for value in node.inputs}
    casts = [node for node in match.nodes | read if node is not None and node.op in CASTS]
    if match.recipe not in _OF_OPERANDS or not casts:
        return
    x = next(piece.value for argument in match.arguments for piece in argument.pieces if isinstance(piece, Of))
    main, _ = operand_of(x, match.nodes, calls)
    found = _Dtypes(match, calls, main)
    if found.of_result() == _OWN:
        asked = f"{_torch(calls)}.{str(x.dtype).removeprefix('torch.')}"
        yield form_guard(main, f"{_text(main, calls)}.dtype == {asked}", calls)
    for other in found.others:
        for expression in (main, other):
            yield form_guard(expression, f"{_text(other, calls)} == {_text(main, calls)}.dtype", calls)


class _Dtypes:
    """Tells where the dtype of the result comes from."""

    def __init__(self, match: Match, calls: CallSites, main: ast.expr) -> None:
        self._match, self._calls, self._main = match, calls, main
        self.others: list[ast.expr] = []  # dtypes of other tensors that are named, to be asked

    def of_result(self) -> str:
        """Return ``_OWN`` where the result has another dtype than the main operand once that is another."""
        nodes = self._match.nodes
        given = {value for node in nodes for value in node.inputs if value.producer not in nodes}
        own = {value for value in given if self._is_cast_before(value)}
        for node in sorted(self._match.nodes, key=lambda each: each.index):
            if node.op in CASTS:
                is_own = self._of_cast(node) == _OWN
            else:
                is_own = any(value in own for value in node.inputs if value.shape)
            if is_own:
                own.update(node.outputs)
        return _OWN if self._match.output in own else _X

    def _is_cast_before(self, value: Value) -> bool:
        """Return whether what the pattern reads is cast to a dtype of its own, and is not the main operand."""
        node, calls = value.producer, self._calls
        if node is None or node.op not in CASTS or node.place_in(calls.frame) is None:
            return False
        cast = calls.expression(node)  # of a helper's, the call of the helper
        homes = calls.source.assignments(self._main) if isinstance(self._main, ast.Name) else []
        if any(cast in ast.walk(each) for each in (self._main, *(home.value for home in homes))):
            return False
        return self._match.recipe not in _PROMOTING and self._of_cast(node) == _OWN

    def _of_cast(self, node: Node) -> str:
        """Return where the dtype of a cast comes from."""
        calls = self._calls
        if node.op not in {"to", "type", "type_as"} or node.place_in(calls.frame) is None:
            return _OWN
        below = node.places[0].frame is not calls.frame
        named = self._handed(node) if below else _named(calls.expression(node))
        if named is None:
            return _OWN
        named = resolved(named, calls.source)
        tensor = named.value if isinstance(named, ast.Attribute) and named.attr == "dtype" else None
        if len(node.inputs) > 1:
            tensor = named
        if tensor is None or not calls.is_tensor(tensor):
            return _OWN
        if self._is_main(tensor):
            return _X
        if self._is_made_inside(tensor) or not reads_only(tensor):
            return _OWN
        asked = named if tensor is not named else ast.copy_location(ast.Attribute(named, "dtype", ast.Load()), named)
        self.others.append(asked)
        return _X

    def _handed(self, node: Node) -> ast.expr | None:
        """Return what the edited function hands a helper as the dtype, or as the tensor whose dtype it casts to."""
        calls, inner = self._calls, node.places[0].frame
        try:
            source = FunctionSource.of(inner.code, {calls.source.file.name: calls.source.file})
            inside = [each for each in calls.nodes if each.place_in(inner) is not None]
            named = _named(CallSites(source, inner, inside, node).expression(node))
        except Refusal:  # there is no source to read, as of a lambda
            return None
        if named is None:
            return None
        named = resolved(named, source)
        tensor = named.value if isinstance(named, ast.Attribute) and named.attr == "dtype" else None
        given = handed(named if tensor is None else tensor, node, source, calls.frame, calls.source)
        if given is None or not within(calls.source.definition, given):
            return None
        return given if tensor is None else ast.copy_location(ast.Attribute(given, "dtype", ast.Load()), given)

    def _is_main(self, tensor: ast.expr) -> bool:
        """Return whether it is a name of the main operand, bound to nothing else between the two."""
        main, file = self._main, self._calls.source.file
        if not isinstance(tensor, ast.Name) or not isinstance(main, ast.Name) or tensor.id != main.id:
            return ast.dump(tensor) == ast.dump(main) and not isinstance(main, ast.Name)
        first, last = sorted((file.start(tensor), file.start(main)))
        return not any(first < end <= last for end in self._bound(tensor))

    def _is_made_inside(self, tensor: ast.expr) -> bool:
        """Return whether it may be made by the pattern, so that it cannot be asked before."""
        source = self._calls.source
        first = min(source.file.start(source.statement(self._calls.expression(node))) for node in self._match.nodes)
        names = [part for part in ast.walk(tensor) if isinstance(part, ast.Name)]
        return any(first < end <= source.file.start(name) for name in names for end in self._bound(name))

    def _bound(self, name: ast.Name) -> list[int]:
        """Return where the statements end that bind ``name`` to something."""
        source = self._calls.source
        stored = [each for each in source.names(name.id) if not isinstance(each.ctx, ast.Load)]
        others = source.bound_otherwise.get(name.id, [])
        return [source.file.end(source.statement(each)) for each in (*stored, *others)]


def _named(cast: ast.AST) -> ast.expr | None:
    """Return the dtype, or the tensor whose dtype it is, that a cast is written with; None where that is not plain."""
    if not isinstance(cast, ast.Call) or not isinstance(cast.func, ast.Attribute):
        return None
    given = [*cast.args, *(each.value for each in cast.keywords if each.arg in {"dtype", "other"})]
    return given[0] if len(given) == len(cast.args) + len(cast.keywords) == 1 else None


def _torch(calls: CallSites) -> str:
    """Return the name that the file has for torch."""
    local = calls.frame.code.co_varnames
    names = [name for name, held in calls.frame.globals.items() if held is torch and name not in local]
    if not names:
        raise Refusal("the result has a fixed dtype, whatever the input's, and the file does not import torch")
    return "torch" if "torch" in names else names[0]


def _text(expression: ast.expr, calls: CallSites) -> str:
    if isinstance(expression, ast.Attribute) and expression.attr == "dtype":
        return f"{_text(expression.value, calls)}.dtype"
    return bracketed(expression, calls.source.file.of(expression))
