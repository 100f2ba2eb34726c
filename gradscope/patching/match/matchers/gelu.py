"""GELU by hand, exact or by tanh, and GELU of a sum with a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gradscope import recipes
from gradscope.patching.match.behaviour import Proofs, Trial, close, rows
from gradscope.patching.match.graph import number
from gradscope.patching.match.match import Argument, Match, Of, why_idle
from gradscope.patching.match.search import Fruitless, Region, after, asked_forms, begins, region
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "gelu"
BIAS_RECIPE = "bias_gelu"

_APPROXIMATIONS = ("none", "tanh")

# How near a function comes that was meant to be GELU, or is a cheaper unit in its place: by the logistic function it is
# 0.7 % off, SiLU 6 %.
_NEAR = 0.02

# One of these is in every spelling.
_SIGNS = frozenset({"tanh", "erf", "erfc", "special_erfc", "special_ndtr", "sigmoid", "exp"})

_KEPT = 100  # tensors for which what is made of them is kept: calls nearby begin with the same


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every GELU that is spelled out; torch's own is none."""
    for unit in _units(recording):
        found = unit.region
        if len(found.nodes) > 1:
            arguments = [Argument("", (Of(found.x, "x"),)), *_approximate(unit.approximate)]
            yield Match(
                RECIPE,
                "gelu",
                tuple(arguments),
                found.nodes,
                found.output,
                optional=found.constants,
                reasons=list(unit.reasons),
            )


def with_bias(recording: Recording) -> Iterator[Match]:
    """Yield every GELU, torch's own too, of a tensor plus a vector of its features."""
    for unit in _units(recording, own=True):
        found = unit.region
        parts = _sum_with_bias(found)
        if parts is None:
            continue
        x, bias, node = parts
        arguments = [Argument("", (Of(x, "x"),)), Argument("", (Of(bias, "bias"),)), *_approximate(unit.approximate)]
        arguments.append(Argument("promote", ("True",)))  # no cast follows the sum
        reasons = list(unit.reasons)
        if not x.dtype == bias.dtype == found.output.dtype:  # then the recipe is what stands there
            reasons.append("the bias's dtype differs from that of the tensor it is added to")
        yield Match(
            BIAS_RECIPE,
            "bias_gelu",
            tuple(arguments),
            found.nodes | {node},
            found.output,
            optional=found.constants,
            reasons=reasons,
            forms=asked_forms([bias]),
            idle=why_idle("bias_gelu", x, elements=math.prod(x.shape)) if len(found.nodes) == 1 else "",
        )


def _approximate(approximate: str) -> list[Argument]:
    return [Argument("approximate", ('"tanh"',))] if approximate == "tanh" else []


@dataclass(frozen=True)
class _Unit:
    region: Region
    approximate: str
    reasons: tuple[str, ...] = ()


def _units(recording: Recording, *, own: bool = False) -> Iterator[_Unit]:
    """Yield GELUs with their approximation, and functions that nearly are."""
    inside: set[Node] = set()
    known: dict[Value, _Tried] = {}
    fruitless = Fruitless()
    for node in recording.nodes:
        if len(known) > _KEPT:
            known.clear()
        if not node.outputs or not node.inputs or node in inside:
            continue
        if own and node.op == "gelu":
            x = node.inputs[0]
            if not _is_added(x):  # not worth a proof
                continue
            found = _unit(node.output, x, _Tried(x))
        elif node.op in _SIGNS and not fruitless.enough(node):
            found = _around(node, known)
        else:
            continue
        fruitless.count(node, found)
        if found is not None:
            inside |= found.region.nodes
            yield found


class _Tried:
    """What is made of random numbers in the place of ``x``, beside its GELUs."""

    def __init__(self, x: Value) -> None:
        numbers = rows(x, 1.0, 3.0)
        self.trial = Trial({x: numbers})
        self.wanted = {approximate: recipes.gelu(numbers, approximate) for approximate in _APPROXIMATIONS}


def _around(sign: Node, known: dict[Value, _Tried]) -> _Unit | None:
    """The unit that the call ``sign`` is a part of; one that is nearly GELU where there is none.

    Args:
        known: what was tried for calls before; it is added to.
    """
    tried: dict[Value, _Tried] = {}
    for x in begins(sign.inputs[0], sign.output.shape):
        if x not in known:
            known[x] = _Tried(x)
        if known[x].trial.of(sign.output) is not None:
            tried[x] = known[x]
    ends = after(sign.output, sign.output.shape)[::-1] if tried else []
    for look in (_unit, _near):
        for x, each in tried.items():
            for output in ends:
                found = look(output, x, each)
                if found is not None:
                    return found
    return None


def _unit(output: Value, x: Value, tried: _Tried) -> _Unit | None:
    """The GELU of ``x`` that ``output`` is."""
    made = tried.trial.of(output)
    for approximate, wanted in tried.wanted.items():
        if close(made, wanted):
            found = region(output, (x,))
            unit = partial(recipes.gelu, approximate=approximate)
            if found is None or not Proofs().proves(found.nodes, output, found.given, unit):
                return None
            return _Unit(found, approximate, tuple(found.reasons))
    return None


def _near(output: Value, x: Value, tried: _Tried) -> _Unit | None:
    """Return what is a GELU of ``x`` but for its numbers."""
    made = tried.trial.of(output)
    found = region(output, (x,)) if any(close(made, wanted, _NEAR) for wanted in tried.wanted.values()) else None
    if found is None:
        return None
    in_place = any(node.changed for node in found.nodes)  # what is read after, and before, it was changed
    reason = (
        "part of it is computed in place" if in_place else ("a constant differs from GELU's: this is another function")
    )
    return _Unit(found, "none", (reason,))


def _is_added(value: Value) -> bool:
    return value.producer is not None and value.producer.op == "add"


def _sum_with_bias(found: Region) -> tuple[Value, Value, Node] | None:
    """Return what the unit is of, where that is a tensor plus a vector of its features, and nobody else reads it."""
    node = found.x.producer
    if node is None or node.op != "add" or len(node.args) != 2 or not set(found.x.users) <= found.nodes:
        return None
    one, other = node.args
    if not isinstance(one, Value) or not isinstance(other, Value) or number(node.kwargs.get("alpha", 1)) != 1:
        return None
    x, bias = (one, other) if one.shape == found.x.shape else (other, one)
    fits = x.shape == found.x.shape and len(x.shape) > 1 and bias.shape == x.shape[-1:]
    return (x, bias, node) if fits and bias.device == x.device and set(node.kwargs) <= {"alpha"} else None
