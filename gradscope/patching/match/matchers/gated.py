"""SwiGLU and GeGLU: silu or GELU of a gate, times another tensor; and why ReLU's are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradscope import recipes
from gradscope.ops import CASTS, COPIES
from gradscope.patching.match.behaviour import Proofs, Trial, close, rows
from gradscope.patching.match.graph import number
from gradscope.patching.match.match import Argument, Match, Of, why_idle
from gradscope.patching.match.search import (
    NOT_CONTIGUOUS,
    Fruitless,
    Region,
    after,
    before,
    begins,
    common_frame,
    region,
)
from gradscope.recording.graph import Node, Recording, Value

SWIGLU = "swiglu"
GEGLU = "geglu"

_MULTIPLIES = frozenset({"mul", "div", "rdiv", "addcmul", "neg", "positive", "reciprocal", *CASTS, *COPIES})
_MOST_FACTORS = 24
_KEPT = 100  # gates for which what is made of them is kept
_MOST_SINCE = 500  # calls between a gate's function and what it is multiplied with


@dataclass(frozen=True)
class _Kind:
    """A gated unit by one activation."""

    recipe: str
    signs: frozenset[str]  # one of these calls is in every spelling
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]]  # by the value of ``approximate``, as it is written


_SWIGLU = _Kind(SWIGLU, frozenset({"silu", "sigmoid", "exp", "tanh"}), {"": recipes.swiglu})
_GEGLU = _Kind(
    GEGLU,
    frozenset({"gelu"}),  # one that is spelled out is replaced by torch's, which gains more and needs no look at `up`
    {"": recipes.geglu, '"tanh"': partial(recipes.geglu, approximate="tanh")},
)


def swiglu(recording: Recording) -> Iterator[Match]:
    """Yield every gated unit by silu."""
    yield from _units(recording, _SWIGLU)


def geglu(recording: Recording) -> Iterator[Match]:
    """Yield every gated unit by torch's GELU, and those by ReLU, with why they are left."""
    yield from _units(recording, _GEGLU)
    yield from _by_relu(recording)


def _by_relu(recording: Recording) -> Iterator[Match]:
    """Yield every ReLU that is squared, or gates a tensor that gets a gradient too: there is nothing to gain."""
    for node in recording.nodes:
        relus = {value for value in node.inputs if _is_relu(value, node)}
        if node.op not in {"mul", "pow", "square"} or not node.outputs or len(relus) != 1:
            continue
        (gate,) = relus
        others = [value for value in node.inputs if value is not gate]
        squared = node.op == "square" or (node.op == "pow" and number(node.argument(1, "exponent")) == 2)
        if squared or (node.op == "mul" and len(node.inputs) == 2 and not others):
            reason = "torch saves only ReLU's output for backward: a recipe would save as much"
        elif node.op == "mul" and [(each.shape, each.requires_grad) for each in others] == [(gate.shape, True)]:
            reason = "torch saves only ReLU's output and the gated tensor for backward: a recipe would save as much"
        else:
            continue
        assert gate.producer is not None
        arguments = (Argument("", (Of(gate.producer.inputs[0], "gate"),)),)
        yield Match(GEGLU, GEGLU, arguments, frozenset({gate.producer, node}), node.output, reasons=[reason])


def _is_relu(value: Value, node: Node) -> bool:
    """Return whether ``value`` is what ReLU made in the function that calls ``node``."""
    made = value.producer
    if made is None or made.op != "relu" or not made.places or not node.places or len(value.shape) < 2:
        return False
    return value.requires_grad and made.places[0].frame is node.places[0].frame


def _units(recording: Recording, kind: _Kind) -> Iterator[Match]:
    seen: set[Value] = set()
    known: dict[Value, Trial] = {}
    fruitless = Fruitless()
    for node in recording.nodes:
        if node.op in kind.signs and node.outputs and node.inputs and not fruitless.enough(node):
            if len(known) > _KEPT:
                known.clear()
            gates = begins(node.inputs[0], node.output.shape)
            found = next(filter(None, (_from(gate, node, kind, known) for gate in gates)), None)
            fruitless.count(node, found)
            if found is not None and found.region.output not in seen:
                seen.add(found.region.output)
                yield _match(found, kind)


@dataclass(frozen=True)
class _GatedUnit:
    region: Region
    approximate: str  # a key of its kind's functions


def _from(gate: Value, sign: Node, kind: _Kind, known: dict[Value, Trial]) -> _GatedUnit | None:
    """The unit of ``gate`` around the call ``sign``; ``known`` is what was tried for gates before."""
    if gate not in known:
        known[gate] = Trial({gate: rows(gate)})
    if known[gate].of(sign.output) is None:
        return None
    for output in after(sign.output, gate.shape):
        node = output.producer
        if node is None or node.op not in {"mul", "div", "addcmul"} or len(node.inputs) < 2:
            continue
        for up in _others(output, gate, sign):
            found = _unit(output, gate, up, kind)
            if found is not None:
                return found
    return None


def _others(output: Value, gate: Value, sign: Node) -> list[Value]:
    """Return what the unit may be multiplied with."""
    factors = _factors(output)
    return [value for value in before(output, gate.shape) if value in factors and not _may_depend(value, sign)]


def _factors(output: Value) -> set[Value]:
    """The tensors that ``output`` is a product or a quotient of, however it is bracketed."""
    found: set[Value] = set()
    frontier = [output]
    while frontier and len(found) < _MOST_FACTORS:
        node = frontier.pop().producer
        if node is not None and node.op in _MULTIPLIES:
            frontier += [read for read in node.inputs if read not in found]
            found |= set(node.inputs)
    return found


def _may_depend(value: Value, sign: Node) -> bool:
    """Return whether ``value`` comes from the call ``sign``, or from so many later ones that it is not looked for."""
    found: set[Node] = set()
    frontier = [value]
    while frontier:
        node = frontier.pop().producer
        if node is not None and node not in found and node.index >= sign.index:
            found.add(node)
            frontier += node.inputs
            if node is sign or len(found) > _MOST_SINCE:
                return True
    return False


def _unit(output: Value, gate: Value, up: Value, kind: _Kind) -> _GatedUnit | None:
    numbers = rows(gate, 1.0, 3.0), rows(up)
    made = Trial(dict(zip((gate, up), numbers, strict=True))).of(output)
    for approximate, function in kind.functions.items():
        if close(made, function(*numbers)):
            found = region(output, (gate, up))
            proved = found is not None and Proofs().proves(found.nodes, output, found.given, function)
            return _GatedUnit(found, approximate) if found is not None and proved else None
    return None


def _match(unit: _GatedUnit, kind: _Kind) -> Match:
    found = unit.region
    gate, up = found.given
    reasons = found.reasons
    if up.dtype != gate.dtype:
        reasons.append("the gate's dtype differs from that of the gated tensor")
    if not found.is_contiguous:
        reasons.append(NOT_CONTIGUOUS)
    one_by_one = Match(
        kind.recipe,
        kind.recipe,
        (
            Argument("", (Of(gate, "gate"),)),
            Argument("", (Of(up, "up"),)),
            *([Argument("approximate", (unit.approximate,))] if unit.approximate else []),
        ),
        found.nodes,
        found.output,
        optional=found.constants,
        reasons=reasons,
        idle=why_idle(kind.recipe, gate, elements=math.prod(gate.shape)),
    )
    packed = _packed(found) if kind is _SWIGLU else None
    if packed is None or reasons:
        return one_by_one
    whole, splits = packed
    return Match(
        SWIGLU,
        SWIGLU,
        (Argument("", (Of(whole, "packed"),)),),
        found.nodes.union(splits),
        found.output,
        optional=found.constants,
        forms=tuple((whole, test) for test in _tests(whole, splits)),
        otherwise=one_by_one,
        idle=why_idle("swiglu of a packed tensor", gate, elements=math.prod(gate.shape)),
    )


def _packed(found: Region) -> tuple[Value, list[Node]] | None:
    """The tensor whose halves gate and up are, in this order, and the calls that split it; None where they are not."""
    gate, up = found.given
    one, other = gate.producer, up.producer
    if one is None or other is None or not one.inputs or one.inputs[0] is not other.inputs[0]:
        return None
    whole = one.inputs[0]
    width = gate.shape[-1]
    if whole.shape != (*gate.shape[:-1], 2 * width) or common_frame({*found.nodes, one, other}) is not common_frame(
        found.nodes
    ):
        return None
    if one is other:
        halves = one.op in {"chunk", "split", "tensor_split", "split_with_sizes"} and list(one.outputs) == [gate, up]
    else:
        halves = (
            one.op == other.op == "getitem"
            and _is_half(one, slice(None, width))
            and _is_half(other, slice(width, None))
        )
    return (whole, [one] if one is other else [one, other]) if halves else None


def _tests(whole: Value, splits: list[Node]) -> Iterator[str]:
    """Yield what is asked of the shape of ``whole``, that it is split into its halves another time too."""
    if not all(map(_is_last, splits)):
        yield f".dim() == {len(whole.shape)}"
    if len(splits) > 1:
        first, second = map(_last_index, splits)
        if first.stop != second.start or second.stop is not None:  # else only halves can be multiplied
            yield f".size(-1) == {whole.shape[-1]}"


def _is_last(node: Node) -> bool:
    """Check that what splits a tensor says that it is along the last dimension, however many there are."""
    if node.op == "getitem":
        return isinstance(node.args[1], tuple) and Ellipsis in node.args[1]
    return bool(node.argument(2, "dim") == -1)


def _last_index(node: Node) -> Any:
    return node.args[1][-1] if isinstance(node.args[1], tuple) else node.args[1]


def _is_half(node: Node, wanted: slice) -> bool:
    """Return whether an index takes these of the last dimension and everything of the others."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    size = node.inputs[0].shape[-1]
    rest = [each for each in index[:-1] if each is not Ellipsis]
    last = _last_index(node)
    if any(each != slice(None) for each in rest) or not isinstance(last, slice):
        return False
    return last.step in (None, 1) and range(size)[last] == range(size)[wanted]
