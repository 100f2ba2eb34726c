"""A formula proved on numbers: the recorded calls run again in float64, against the formula and against a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.patching.algebra import Atom, Sum, close
from gradscope.patching.formula import constant, uncast
from gradscope.patching.graph import CASTS
from gradscope.patching.recording import Node, Value

# Of results around 1 in float64; near zero statistics a gradient may be larger and is compared relatively.
_CLOSE = 1e-10

# How far a number may be from the one it stands for, relatively: 0.79788456 for the root of 2 / pi.
CONSTANTS = 1e-6

_MOST = 2  # of each dimension but the last: patterns treat rows alike


def proves(
    nodes: Iterable[Node],
    output: Value,
    given: Iterable[Value],
    formula: Sum,
    wanted: Sum,
    function: Callable[[Mapping[int, Tensor]], Tensor],
) -> bool:
    """Whether calls are what a formula says, that formula is the wanted one, and that one is the function.

    The calls are run on random numbers with the recorded sizes of the last dimension. Their result is compared with the
    formula's, and the function's with the wanted formula's; so are all gradients. Between the formulas the constants
    may differ by ``CONSTANTS``.

    Args:
        nodes: the calls between ``given`` and ``output``.
        function: of the tensors by their index, as the leaves of a formula have it.
    """
    if not close(formula, wanted, CONSTANTS):
        return False
    leaves = {uncast(value).index: value for value in given}
    random = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for _ in range(2):
                tensors = {index: _random(value, random) for index, value in leaves.items()}
                made = _run(nodes, output, tensors)
                upstream = torch.randn(made.shape, dtype=torch.float64, generator=random)
                if not _agree(made, evaluate(formula, tensors), tensors, upstream):
                    return False
                if not _agree(function(tensors), evaluate(wanted, tensors), tensors, upstream):
                    return False
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return True


class Proofs:
    """Proofs of one recording: what a loop does in each of its rounds is proved once."""

    def __init__(self) -> None:
        self._known: dict[object, bool] = {}

    def proves(
        self,
        name: str,
        nodes: Iterable[Node],
        output: Value,
        given: Sequence[Value],
        formula: Sum,
        wanted: Sum,
        function: Callable[[Mapping[int, Tensor]], Tensor],
    ) -> bool:
        """As :func:`proves`; ``name`` tells functions apart."""
        key = (name, _form(nodes, output, given))
        if key not in self._known:
            self._known[key] = proves(nodes, output, given, formula, wanted, function)
        return self._known[key]


def _form(nodes: Iterable[Node], output: Value, given: Sequence[Value]) -> object:
    """Equal for equal calls of tensors of equal shapes, with the same numbers."""
    numbers = {value: f"given {number}" for number, value in enumerate(given)}

    def shown(argument: Any) -> object:
        if isinstance(argument, Value):
            if argument in numbers:
                return numbers[argument]
            origin = uncast(argument)
            known = next((name for value, name in numbers.items() if uncast(value) is origin), None)
            return known if known is not None else ("number", constant(argument))
        if isinstance(argument, (tuple, list)):
            return tuple(shown(each) for each in argument)
        if isinstance(argument, dict):
            return tuple((name, shown(each)) for name, each in argument.items())
        return repr(argument)

    calls = []
    for node in sorted(nodes, key=lambda each: each.index):
        calls.append((node.op, shown(node.args), shown(node.kwargs)))
        for value in node.outputs:
            numbers[value] = f"made {len(numbers)}"
    shapes = tuple((value.shape, value.dtype) for value in given)
    return shapes, tuple(calls), numbers.get(output)


def evaluate(formula: Sum, tensors: Mapping[int, Tensor]) -> Tensor:
    """The formula's value where each leaf is the tensor of that index."""
    found = torch.zeros((), dtype=torch.float64)
    for product, coefficient in formula.terms:
        term = torch.tensor(coefficient, dtype=torch.float64)
        for atom, exponent in product:
            value = _value(atom, tensors)
            term = term * (value if exponent == 1 else value**exponent)
        found = found + term
    return found


def _value(atom: Atom, tensors: Mapping[int, Tensor]) -> Tensor:
    if atom.of is None:
        return tensors[atom.leaf]
    inner = evaluate(atom.of, tensors)
    if atom.kind == "mean":
        return inner.mean(-1, keepdim=True)
    return (
        inner
        if atom.kind == "sum"
        else {"exp": torch.exp, "sigmoid": torch.sigmoid, "erf": torch.erf}[atom.kind](inner)
    )


def _random(value: Value, random: torch.Generator) -> Tensor:
    shape = [min(size, _MOST) for size in value.shape[:-1]] + list(value.shape[-1:])
    return torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()


def _agree(one: Tensor, other: Tensor, tensors: Mapping[int, Tensor], upstream: Tensor) -> bool:
    """Whether two results and their gradients are equal but for rounding."""
    if one.shape != other.shape:
        return False
    pairs = [(one, other)]
    for each in tensors.values():
        left, right = (
            torch.autograd.grad(result, each, upstream, retain_graph=True, allow_unused=True)[0]
            for result in (one, other)
        )
        if left is None or right is None:
            return False
        pairs.append((left, right))
    return all(bool((a - b).abs().max() <= _CLOSE * b.abs().max().clamp(min=1)) for a, b in pairs)


def _run(nodes: Iterable[Node], output: Value, tensors: Mapping[int, Tensor]) -> Tensor:
    """The calls in their order; casts are left out."""
    made: dict[Value, Tensor] = {}

    def of(argument: Any) -> Any:
        if isinstance(argument, Value):
            if argument in made:
                return made[argument]
            index = uncast(argument).index
            if index in tensors:
                return tensors[index]
            held = constant(argument)
            if held is None:
                raise LookupError("a tensor that was not given")
            return torch.tensor(held, dtype=torch.float64)
        if isinstance(argument, torch.dtype):
            return torch.float64 if argument.is_floating_point else argument
        if isinstance(argument, (tuple, list)):
            return type(argument)(of(each) for each in argument)
        return argument

    for node in sorted(nodes, key=lambda each: each.index):
        if node.op in CASTS:
            made[node.output] = of(node.inputs[0])
            continue
        result = node.function(*of(node.args), **{name: of(each) for name, each in node.kwargs.items()})
        results = [result] if isinstance(result, Tensor) else list(result)
        made.update(zip(node.outputs, results, strict=True))
    return made[output]
