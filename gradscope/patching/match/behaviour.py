"""What recorded calls do, told from running them again in float64 on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.ops import CASTS, COPIES, SCALES
from gradscope.patching.match.graph import cast_source, constant, filled, uncast
from gradscope.recording.graph import Node, Value

# How far results and gradients may be from the recipe's, relatively to the largest: what a constant written with seven
# digits makes of them, as 0.7978846 for the root of 2 / pi. In float64 everything else is equal to fourteen.
CLOSE = 1e-6

_NOISE = 1e-10  # of gradients that are 0: those of a layer normalisation of two features

_SEED = 0x5EED5EED  # of gradients, which must not be the operands: a normalisation's would be 0

_ROWS = 2  # of each dimension but the last: patterns treat rows alike
_MOST = 40  # calls between what is given and a result; patterns that are written have up to fifteen
_LIFTING = (Ellipsis, None, slice(None))

UNIT = "normalize"  # a vector over its length
REDUCTIONS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_norm", "linalg_vector_norm", UNIT}
)
# A pattern has one of these at most between its operand and what gives it away.
FUNCTIONS = frozenset(
    {"exp", "tanh", "sigmoid", "silu", "erf", "erfc", "special_erfc", "special_ndtr", "gelu", "sqrt", "rsqrt"}
)
_ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "rdiv", "neg", "positive", "square", "reciprocal", "pow", "addcmul", "addcdiv"}
)
_LENGTHS = frozenset({"norm", "linalg_norm", "linalg_vector_norm"})
UNDERSTOOD = FUNCTIONS | REDUCTIONS | _ARITHMETIC | CASTS | COPIES | {"unsqueeze", "getitem"}


def is_understood(node: Node) -> bool:
    """Tell a call that may be a part of a pattern: what it does depends on nothing but its arguments."""
    if node.op == "getitem":  # a dimension that a reduction took away is put back
        return lifts(node)
    if node.op in CASTS:
        return bool(node.outputs) and cast_source(node.output) is not None
    return node.op in UNDERSTOOD or bound_of(node) is not None


def bound_of(node: Node) -> tuple[float, float] | None:
    """What a multiple of a vector's length is kept from being less than, and which multiple; None of other calls.

    The bound is a positive number: of random numbers in a length's place, which have both signs, it changes some, so
    that no pattern which begins there overlooks it.
    """
    if node.op not in {"clamp", "clamp_min"} or not node.inputs or node.changed:
        return None
    least, most = node.argument(1, "min"), node.argument(2, "max")
    if isinstance(least, bool) or not isinstance(least, (int, float)) or least <= 0 or most is not None:
        return None
    value, factor = node.inputs[0], 1.0
    while (made := value.producer) is not None and made.op not in _LENGTHS:
        if made.op in SCALES and len(made.args) == 2 and not made.kwargs and isinstance(made.args[0], Value):
            times = constant(made.args[1])
            if not times:
                return None
            factor *= times if made.op == "mul" else 1 / times
        elif cast_source(value) is None:
            return None
        value = made.inputs[0]
    return (float(least), factor) if made is not None and factor > 0 else None


def lifts(node: Node) -> bool:
    """Tell an index that adds dimensions and leaves nothing out, as in ``x[..., None]``."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(not isinstance(part, Value) and part in _LIFTING for part in index)


def operands(node: Node) -> tuple[Value, ...]:
    """The tensors whose content a call reads: of a cast by another tensor's dtype not that one."""
    return node.inputs[:1] if node.op in CASTS else node.inputs


class Trial:
    """Numbers for given tensors, and what calls make of them; a tensor and its casts are one."""

    def __init__(self, given: Mapping[Value, Tensor]) -> None:
        self._given = {uncast(value).index: tensor for value, tensor in given.items()}
        self._made: dict[Value, Tensor] = {}
        self._none: set[Value] = set()

    def of(self, value: Value) -> Tensor | None:
        """Return what ``value`` is; None where it is made of other tensors too, or far from those that are given."""
        calls = None if value in self._none else self._calls(value)
        if calls is not None:
            try:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    for node in calls:
                        self._made.update(_run(node, self._operand, apart=True))
                return self._operand(value)
            except (RuntimeError, TypeError, ValueError, LookupError):
                pass
        self._none.add(value)
        return None

    def _operand(self, value: Value) -> Tensor:
        found = self._made.get(value, self._given.get(uncast(value).index))
        return _number(value) if found is None else found

    def _calls(self, value: Value) -> list[Node] | None:
        """The calls that are still to be made for ``value``, in their order; None where they cannot be."""
        found: set[Node] = set()
        left = [value]
        while left:
            each = left.pop()
            if each in self._made or uncast(each).index in self._given or constant(each) is not None:
                continue
            node = each.producer
            if node is None or not is_understood(node) or each in self._none or len(found) > _MOST:
                return None
            if node not in found:
                found.add(node)
                left += operands(node)
        return sorted(found, key=_index)


def rows(value: Value, *scales: float, more: tuple[int, int] = (0, 0)) -> Tensor:
    """Return random numbers with the features of ``value``, [2, ..., C] in float64.

    Args:
        scales: sizes of the rows, in turns; 1 without any.
        more: dimensions and features than ``value`` has.
    """
    scales = scales or (1.0,)
    shape = [_ROWS] * (len(value.shape) - 1 + more[0]) + [size + more[1] for size in value.shape[-1:]]
    found = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(value.index))
    first, second = found.view(-1)[:1], found.view(-1)[1:2]
    first.abs_(), second.abs_().neg_()  # of both signs, however few there are: a size is not the number itself
    factors = torch.tensor([scales[row % len(scales)] for row in range(found[..., 0].numel())], dtype=torch.float64)
    return found * factors.view(*shape[:-1], 1)


def close(one: Tensor | None, other: Tensor, tolerance: float = CLOSE) -> bool:
    """Tell two results that differ by no more than ``tolerance`` of the second's largest number."""
    if one is None or one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= tolerance * other.abs().max() + _NOISE)


class Proofs:
    """Proofs that calls do what a function does; what a loop does in each of its rounds is proved once."""

    def __init__(self) -> None:
        self._known: dict[object, bool] = {}

    def proves(
        self,
        nodes: Iterable[Node],
        output: Value,
        given: Sequence[Value],
        function: Callable[..., Tensor],
        *,
        name: str = "",
        scale: float = 1.0,
        more: tuple[int, int] = (0, 0),
    ) -> bool:
        """Compare results and all gradients on random numbers of size 1 and of size ``scale``.

        Args:
            function: of tensors in the order of ``given``, a vector of the features as [C].
            name: tells functions apart.
            more: dimensions and features of the main operand than it was recorded with.
        """
        nodes = sorted(nodes, key=_index)
        key = (name, scale, more, _form(nodes, output, given))
        if key not in self._known:
            self._known[key] = _proves(nodes, output, given, function, scale, more)
        return self._known[key]


def _proves(
    nodes: list[Node],
    output: Value,
    given: Sequence[Value],
    function: Callable[..., Tensor],
    scale: float,
    more: tuple[int, int],
) -> bool:
    main, *others = given
    random = torch.Generator().manual_seed(_SEED)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for size in (1.0, scale):
                tensors = [rows(main, size, more=more), *(_operand(other, main, random) for other in others)]
                leaves = [tensor.requires_grad_() for tensor in tensors]
                made = _again(nodes, output, dict(zip(given, leaves, strict=True)))
                wanted = function(*(_flat(tensor, main) for tensor in leaves))
                upstream = torch.randn(wanted.shape, dtype=torch.float64, generator=random)
                if not close(made, wanted) or not _same_gradients(made, wanted, leaves, upstream):
                    return False
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return True


def _operand(value: Value, main: Value, random: torch.Generator) -> Tensor:
    """Draw numbers in the main operand's shape, or for a vector of the features in its own."""
    if value.shape == main.shape:
        return rows(value)
    return torch.randn(value.shape, dtype=torch.float64, generator=random)


def _flat(tensor: Tensor, main: Value) -> Tensor:
    return tensor.flatten() if tensor.numel() == main.shape[-1] else tensor


def _same_gradients(made: Tensor, wanted: Tensor, leaves: list[Tensor], upstream: Tensor) -> bool:
    both = [
        torch.autograd.grad(result, leaves, upstream, retain_graph=True, allow_unused=True) for result in (made, wanted)
    ]
    return all(one is not None and other is not None and close(one, other) for one, other in zip(*both, strict=True))


def _again(nodes: list[Node], output: Value, given: Mapping[Value, Tensor]) -> Tensor:
    """The calls in their order, as they are: also those that work in place."""
    held = {uncast(value).index: tensor for value, tensor in given.items()}
    made: dict[Value, Tensor] = {}

    def operand(value: Value) -> Tensor:
        found = made.get(value, held.get(uncast(value).index))
        return _number(value) if found is None else found

    for node in nodes:
        made.update(_run(node, operand))
    return made[output]


def _run(node: Node, operand: Callable[[Value], Tensor], *, apart: bool = False) -> Iterator[tuple[Value, Tensor]]:
    """Return what one call makes; a cast hands on what it is given.

    Args:
        apart: what works in place does so on a copy.
    """
    if node.op in CASTS:
        return iter([(node.output, operand(node.inputs[0]))])

    args, kwargs = filled(node.args, operand, _in_float64), filled(node.kwargs, operand, _in_float64)
    if apart and node.changed:
        args = (args[0].clone(), *args[1:])
    result = node.function(*args, **kwargs)
    return zip(node.outputs, [result] if isinstance(result, Tensor) else list(result), strict=True)


def _in_float64(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument


def _number(value: Value) -> Tensor:
    held = constant(value)
    if held is None:
        raise LookupError("a tensor that was not given")
    return torch.tensor(held, dtype=torch.float64)


def _form(nodes: Iterable[Node], output: Value, given: Sequence[Value]) -> object:
    """Return what is equal for equal calls on equal shapes, with the same numbers, in place or not."""
    names = {uncast(value): f"given {number}" for number, value in enumerate(given)}
    names |= {value: f"given {number}" for number, value in enumerate(given)}
    calls = []
    for node in nodes:
        calls.append((node.op, bool(node.changed), _shown(node.args, names), _shown(node.kwargs, names)))
        for value in node.outputs:
            names[value] = f"made {len(names)}"
    shapes = tuple((value.shape, value.dtype) for value in given)
    return shapes, tuple(calls), names.get(output)


def _shown(argument: Any, names: Mapping[Value, str]) -> object:
    if isinstance(argument, Value):
        name = names.get(argument, names.get(uncast(argument)))
        return name if name is not None else ("number", constant(argument))
    if isinstance(argument, (tuple, list)):
        return tuple(_shown(each, names) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _shown(each, names)) for name, each in argument.items())
    return repr(argument)


def _index(node: Node) -> int:
    return node.index
