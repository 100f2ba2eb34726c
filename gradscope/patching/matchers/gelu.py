"""GELU by hand, exact or by tanh, and GELU of a sum with a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from gradscope import recipes
from gradscope.patching import algebra
from gradscope.patching.again import CONSTANTS, proves
from gradscope.patching.formula import Formulas, uncast
from gradscope.patching.graph import number
from gradscope.patching.idle import why_idle
from gradscope.patching.match import Argument, Match, Of
from gradscope.patching.matchers.search import Region, after, before, formula_of, is_function_of, region
from gradscope.patching.recording import Node, Recording, Value

RECIPE = "gelu"
BIAS_RECIPE = "bias_gelu"

# How near a formula's numbers come that was meant to be GELU, or is a cheaper unit with its form.
_NEAR = 0.2

# One of these is in every spelling.
_SIGNS = frozenset({"tanh", "erf", "erfc", "special_erfc", "special_ndtr", "sigmoid", "exp"})

# After so many of them that are no GELU's, one after the other, the rest is taken for more of the same: a recurrence
# has some in each of its steps, and looking at one takes 1 ms there.
_FRUITLESS = 150

_KEPT = 100  # tensors whose formulas are kept: calls nearby begin with the same


def matches(recording: Recording) -> Iterator[Match]:
    """Every GELU that is spelled out; torch's own is none."""
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
    """Every GELU, torch's own too, of a tensor plus a vector of its features."""
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
            reasons.append("the bias has another dtype than what it is added to")
        yield Match(
            BIAS_RECIPE,
            "bias_gelu",
            tuple(arguments),
            found.nodes | {node},
            found.output,
            optional=found.constants,
            reasons=reasons,
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
    """GELUs with their approximation, and formulas that are GELU but for their numbers."""
    inside: set[Node] = set()
    given: dict[Value, _Wanted] = {}
    fruitless = 0
    for node in recording.nodes:
        if len(given) > _KEPT:
            given.clear()
        if not node.outputs or not node.inputs or node in inside:
            continue
        if fruitless == _FRUITLESS:
            return
        if own and node.op == "gelu":
            if not _is_added(node.inputs[0]):  # not worth a proof
                continue
            found = _unit(node.output, _Wanted(node.inputs[0]), CONSTANTS)
        elif node.op in _SIGNS:
            found = _around(node, given)
        else:
            continue
        fruitless += 1
        if found is not None:
            fruitless = 0
            inside |= found.region.nodes
            yield found


class _Wanted:
    """The formulas of a GELU of ``x``."""

    def __init__(self, x: Value) -> None:
        self.x, self.formulas = x, Formulas(x, alone=True)

    @cached_property
    def by_name(self) -> dict[str, algebra.Sum]:
        """Exact, by tanh, by the logistic function."""
        leaf = self.formulas.leaf(self.x)
        return {name: _formula(leaf, name) for name in ("none", "tanh", "logistic")}


def _around(sign: Node, given: dict[Value, _Wanted]) -> _Unit | None:
    """The unit that the call ``sign`` is a part of; one with other numbers where there is none.

    Args:
        given: what was looked at for calls before; it is added to.
    """
    values = before(sign.inputs[0], sign.output.shape)
    for x in values:
        if x not in given:
            given[x] = _Wanted(x)
    begins = [
        wanted for wanted in map(given.__getitem__, values) if is_function_of(wanted.formulas, sign.output, wanted.x)
    ]
    if not begins:
        return None
    ends = {wanted: after(sign.output, wanted.x.shape)[::-1] for wanted in begins}
    for tolerance in (CONSTANTS, _NEAR):
        for wanted in begins:
            for output in ends[wanted]:
                found = _unit(output, wanted, tolerance)
                if found is not None:
                    return found
    return None


def _unit(output: Value, given: _Wanted, tolerance: float) -> _Unit | None:
    formula = formula_of(given.formulas, output)
    if formula is None:
        return None
    x = given.x
    for approximate, wanted in given.by_name.items():
        if not algebra.close(formula, wanted, tolerance):
            continue
        found = region(output, (x,))
        if found is None:
            return None
        if approximate == "logistic" or not algebra.close(formula, wanted, CONSTANTS):
            return _Unit(found, "none", ("a constant is not GELU's: this is another function",))

        def unit(tensors: Mapping[int, Tensor], approximate: str = approximate) -> Tensor:
            return recipes.gelu(tensors[uncast(x).index], approximate)

        proved = proves(found.nodes, output, found.given, formula, wanted, unit)
        return _Unit(found, approximate, tuple(found.reasons)) if proved else None
    return None


def _is_added(value: Value) -> bool:
    return value.producer is not None and value.producer.op == "add"


def _formula(x: algebra.Sum, approximate: str) -> algebra.Sum:
    if approximate == "logistic":
        return algebra.times(x, algebra.sigmoid(algebra.scaled(x, 1.702)))
    return algebra.gelu(x, approximate)


def _sum_with_bias(found: Region) -> tuple[Value, Value, Node] | None:
    """What the unit is of, where that is a tensor plus a vector of its features, and nobody else reads it."""
    node = found.x.producer
    if node is None or node.op != "add" or len(node.args) != 2 or not set(found.x.users) <= found.nodes:
        return None
    one, other = node.args
    if not isinstance(one, Value) or not isinstance(other, Value) or number(node.kwargs.get("alpha", 1)) != 1:
        return None
    x, bias = (one, other) if one.shape == found.x.shape else (other, one)
    fits = x.shape == found.x.shape and len(x.shape) > 1 and bias.shape == x.shape[-1:]
    return (x, bias, node) if fits and bias.device == x.device and set(node.kwargs) <= {"alpha"} else None
