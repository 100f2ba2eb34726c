"""From recorded calls to formulas: what a tensor is, written by tensors that are taken as given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradscope.patching import algebra
from gradscope.patching.algebra import Sum, TooLongError
from gradscope.patching.graph import CASTS, COPIES, cast_source, is_fixed, number
from gradscope.patching.recording import Node, Value

_FUNCTIONS: dict[str, Callable[[Sum], Sum]] = {
    "neg": lambda of: algebra.scaled(of, -1),
    "positive": lambda of: of,
    "square": lambda of: algebra.power(of, 2),
    "sqrt": lambda of: algebra.power(of, 0.5),
    "rsqrt": lambda of: algebra.power(of, -0.5),
    "reciprocal": lambda of: algebra.power(of, -1),
    "exp": algebra.exp,
    "tanh": algebra.tanh,
    "sigmoid": algebra.sigmoid,
    "silu": algebra.silu,
    "erf": algebra.erf,
    "erfc": lambda of: algebra.add(algebra.number(1.0), algebra.scaled(algebra.erf(of), -1)),
    "special_erfc": lambda of: algebra.add(algebra.number(1.0), algebra.scaled(algebra.erf(of), -1)),
    "special_ndtr": lambda of: algebra.add(
        algebra.number(0.5), algebra.scaled(algebra.erf(algebra.scaled(of, 0.5**0.5)), 0.5)
    ),
}
_PAIRS: dict[str, Callable[[Sum, Sum], Sum]] = {
    "add": algebra.add,
    "sub": lambda one, other: algebra.add(one, algebra.scaled(other, -1)),
    "rsub": lambda one, other: algebra.add(other, algebra.scaled(one, -1)),
    "mul": algebra.times,
    "div": lambda one, other: algebra.times(one, algebra.power(other, -1)),
    "rdiv": lambda one, other: algebra.times(other, algebra.power(one, -1)),
}
_REDUCED = frozenset({"mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_norm", "linalg_vector_norm"})
_THREE = frozenset({"addcmul", "addcdiv"})

UNDERSTOOD = frozenset(
    {*_FUNCTIONS, *_PAIRS, *_REDUCED, *_THREE, *CASTS, *COPIES, "pow", "gelu", "unsqueeze", "getitem"}
)


_DEEPEST = 24  # calls from the result to what is given; a recurrence over a sequence has thousands


def constant(argument: Any) -> float | None:
    """A number, or a tensor of one that depends on no other than such tensors."""
    if not isinstance(argument, Value):
        return number(argument)
    return number(argument) if argument.shape == () and is_fixed(argument) else None


def uncast(value: Value) -> Value:
    """What a tensor was before casts and copies."""
    way = []
    while (source := value.uncast or _handed_on(value)) is not None:
        way.append(value)
        value = source
    for each in way:
        each.uncast = value
    return value


def _handed_on(value: Value) -> Value | None:
    node = value.producer
    if node is None or not node.inputs:
        return None
    if node.op in COPIES and not node.changed and node.inputs[0].shape == value.shape:
        return node.inputs[0]
    return cast_source(value)


class _TooDeepError(TooLongError):
    """Given up, from where it was asked."""


class Formulas:
    """Formulas by the tensors ``given``, and by all others that no understood call made.

    A tensor and its casts are one. Dropout and the like are not understood, also where they return what they got.
    With ``alone`` a formula that has any other tensor is none: what a recurrence was made of is not written out.
    """

    def __init__(self, *given: Value, alone: bool = False) -> None:
        self._alone = alone
        self._given = {uncast(value).index: value for value in given}
        self._known: dict[int, Sum] = {}
        self._none: set[int] = set()  # what is no formula
        self._deep = 0
        self._too_deep: dict[int, int] = {}  # how deep it was already where that was too deep

    def of(self, value: Value) -> Sum:
        """What ``value`` is.

        Raises:
            TooLongError: the formula is not of a kind that is kept.
        """
        found = self._known.get(value.index)
        if found is None:
            if self._deep >= self._too_deep.get(value.index, _DEEPEST):
                raise _TooDeepError
            if value.index in self._none:
                raise TooLongError
            self._deep += 1
            try:
                found = self._known[value.index] = self._read(value)
            except _TooDeepError:  # from a nearer result it may be reached
                self._too_deep[value.index] = self._deep - 1
                raise
            except TooLongError:
                self._none.add(value.index)
                raise
            finally:
                self._deep -= 1
        return found

    def index(self, value: Value) -> int:
        """By which index ``value`` stands in a formula."""
        return uncast(value).index

    def is_given(self, value: Value) -> bool:
        """Whether it is a given tensor, or a cast of one."""
        return uncast(value).index in self._given

    def leaf(self, value: Value) -> Sum:
        """A tensor as such."""
        return algebra.tensor(self.index(value), varies=bool(value.shape) and value.shape[-1] != 1)

    def _read(self, value: Value) -> Sum:
        if self.is_given(value):
            return self.leaf(value)
        source = _handed_on(value)
        if source is not None:
            return self.of(source)
        node = value.producer
        if node is None or node.op not in UNDERSTOOD or not value.dtype.is_floating_point:
            return self._other(value)
        found = self._called(node, value)
        return self._other(value) if found is None else found

    def _other(self, value: Value) -> Sum:
        """A tensor that was not given."""
        if self._alone:
            raise TooLongError
        return self.leaf(value)

    def _called(self, node: Node, value: Value) -> Sum | None:
        """What a call made; None where its arguments are not understood."""
        args, kwargs = list(node.args), dict(node.kwargs)
        op = node.op
        if op in _REDUCED:
            return self._reduced(node, value)
        if op in {"unsqueeze", "getitem"}:
            return self._unsqueezed(node, value)
        if op == "gelu":
            approximate = kwargs.pop("approximate", args[1] if len(args) > 1 else "none")
            return algebra.gelu(self._operand(args[0]), str(approximate)) if args and not kwargs else None
        if op in _FUNCTIONS:
            kwargs.pop("inplace", None)
            args += [kwargs.pop("input")] if "input" in kwargs else []
            return _FUNCTIONS[op](self._operand(args[0])) if not kwargs and args else None
        if op in _THREE:
            return self._three(node)
        for name in ("input", "self", "other", "exponent"):
            args += [kwargs.pop(name)] if name in kwargs else []
        factor = number(kwargs.pop("alpha", args.pop() if len(args) == 3 and op in {"add", "sub"} else 1.0))
        if kwargs or len(args) != 2 or factor is None:
            return None
        if op == "pow":
            exponent = constant(args[1])
            return None if exponent is None or not isinstance(args[0], Value) else self._power(args[0], exponent)
        one, other = (self._operand(each) for each in args)
        if factor != 1.0:
            one, other = (algebra.scaled(one, factor), other) if op == "rsub" else (one, algebra.scaled(other, factor))
        return _PAIRS[op](one, other)

    def _power(self, value: Value, exponent: float) -> Sum:
        return algebra.power(self.of(value), exponent)

    def _operand(self, argument: Any) -> Sum:
        found = constant(argument)
        if found is not None:
            return algebra.number(found)
        if not isinstance(argument, Value):
            raise TooLongError
        return self.of(argument)

    def _three(self, node: Node) -> Sum | None:
        names = ("input", "tensor1", "tensor2")
        args = [*node.args, *(node.kwargs[name] for name in names if name in node.kwargs)]
        factor = number(node.kwargs.get("value", 1.0))
        if len(args) != 3 or factor is None or set(node.kwargs) - {*names, "value"}:
            return None
        first, one, other = (self._operand(each) for each in args)
        other = algebra.power(other, -1) if node.op == "addcdiv" else other
        return algebra.add(first, algebra.scaled(algebra.times(one, other), factor))

    def _unsqueezed(self, node: Node, value: Value) -> Sum | None:
        """A dimension that a reduction took away, put back."""
        below = node.inputs[0]
        given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if node.op == "unsqueeze":
            last = given in {-1, len(value.shape) - 1}
        else:
            index = given if isinstance(given, tuple) else (given,)
            whole = all(each is Ellipsis or each == slice(None) for each in index[:-1])
            last = index[-1] is None and whole and (Ellipsis in index or len(index) == len(value.shape))
        if not last or below.producer is None or below.producer.op not in _REDUCED:
            return None
        return self._reduced(below.producer, below, lifted=True)

    def _reduced(self, node: Node, value: Value, *, lifted: bool = False) -> Sum | None:
        """A mean, a sum, a variance or a length over the last dimension, which must stay as one of size 1."""
        statistic = statistic_of(node)
        if statistic is None or not node.inputs or statistic.dims != (-1,) or statistic.keeps == lifted:
            return None
        given = self.of(node.inputs[0])
        count = node.inputs[0].shape[-1]
        if count < 2:
            return None
        centre = algebra.mean(given)
        if node.op in {"mean"} or (node.op.endswith("_mean") and value is node.outputs[-1]):
            return centre
        if node.op == "sum":
            return algebra.scaled(centre, count)
        squares = algebra.mean(algebra.power(given, 2))
        if "norm" in node.op:
            return algebra.power(algebra.scaled(squares, count), 0.5) if statistic.order == 2 else None
        if statistic.correction >= count:
            return None
        spread = algebra.add(squares, algebra.scaled(algebra.power(centre, 2), -1))
        spread = algebra.scaled(spread, count / (count - statistic.correction))
        return algebra.power(spread, 0.5) if node.op.startswith("std") else spread


class Statistic:
    """The arguments of a reduction."""

    def __init__(self, dims: tuple[int, ...], keeps: bool, correction: float, order: float) -> None:
        self.dims, self.keeps, self.correction, self.order = dims, keeps, correction, order


def statistic_of(node: Node) -> Statistic | None:
    """The arguments of a reduction, dimensions counted from the end; None where they are not understood."""
    args, kwargs = list(node.args[1:]), dict(node.kwargs)
    kwargs.pop("input", None)
    dtype = kwargs.pop("dtype", None)
    if not node.inputs or (dtype is not None and not dtype.is_floating_point) or "out" in kwargs:
        return None
    order = 2.0
    if "norm" in node.op:
        given = kwargs.pop("p", kwargs.pop("ord", args.pop(0) if args else 2))
        given = 2 if given in (None, "fro") else given
        if not isinstance(given, (int, float)):
            return None
        order = float(given)
    spread = node.op.startswith(("var", "std"))
    dim = kwargs.pop("dim", kwargs.pop("axis", None))
    if dim is None and args and not isinstance(args[0], bool):
        dim = args.pop(0)
    unbiased = kwargs.pop("unbiased", args.pop(0) if spread and args and isinstance(args[0], bool) else None)
    correction = kwargs.pop("correction", None)
    keeps = kwargs.pop("keepdim", args.pop(0) if args and isinstance(args[0], bool) else False)
    if args or kwargs or dim is None:
        return None
    rank = len(node.inputs[0].shape)
    dims = tuple(sorted((each - rank) if each >= 0 else each for each in ((dim,) if isinstance(dim, int) else dim)))
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    return Statistic(dims, bool(keeps), float(correction), order)


def is_half(dtype: torch.dtype) -> bool:
    """Whether it has two bytes or fewer."""
    return dtype.itemsize < 4
