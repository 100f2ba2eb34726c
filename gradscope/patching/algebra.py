"""Formulas in one canonical form, so that equal ones are equal however they were spelled.

A formula is a sum of products of powers, with numbers folded, equal terms collected and products of sums multiplied
out. What cannot be multiplied out is an atom: a tensor, the mean over the last dimension, a function's value, a sum
under a root. tanh is written by the logistic function, of which the argument's first term is positive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

_MOST = 40  # terms; a formula with more is none that anybody wrote down as one
_DEEPEST = 5  # functions of functions; a recurrence nests one in each step, and its text doubles every time
_NOTHING = 1e-13  # a coefficient that is this much smaller than what was added up is 0


class TooLongError(Exception):
    """A formula that is not kept in this form."""


@dataclass(frozen=True, eq=False)
class Atom:
    """A factor: a tensor ("leaf"), "mean", a function ("exp", "sigmoid", "erf"), or a sum ("sum") under a power."""

    kind: str
    of: Sum | None = None
    leaf: int = 0
    varies: bool = True  # along the last dimension

    def __post_init__(self) -> None:
        if self.depth > _DEEPEST:
            raise TooLongError

    @cached_property
    def depth(self) -> int:
        """How many functions stand one in the other."""
        return (
            0
            if self.of is None
            else 1 + max((atom.depth for product, _ in self.of.terms for atom, _ in product), default=0)
        )

    @cached_property
    def key(self) -> str:
        """Equal for equal atoms; coefficients count to nine digits."""
        return f"v{self.leaf}" if self.of is None else f"{self.kind}({self.of.key})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


Product = tuple[tuple[Atom, float], ...]  # atoms and their exponents, sorted by key


@dataclass(frozen=True, eq=False)
class Sum:
    """Products and their coefficients, sorted by key."""

    terms: tuple[tuple[Product, float], ...] = field(default=())

    @cached_property
    def key(self) -> str:
        """Equal for equal formulas."""
        return "+".join(f"{coefficient:.9g}{_product_key(product)}" for product, coefficient in self.terms)

    @property
    def varies(self) -> bool:
        """Whether it has more than one value along the last dimension."""
        return any(_varies(product) for product, _ in self.terms)

    @property
    def constant(self) -> float:
        """The number among its terms."""
        return next((coefficient for product, coefficient in self.terms if not product), 0.0)

    @property
    def leaves(self) -> set[int]:
        """The tensors it is made of."""
        return {found for product, _ in self.terms for atom, _ in product for found in _leaves(atom)}

    def atoms(self) -> Iterable[tuple[Atom, float]]:
        """Every atom with its exponent, those inside of others after these."""
        for product, _ in self.terms:
            for atom, exponent in product:
                yield atom, exponent
                if atom.of is not None:
                    yield from atom.of.atoms()


def number(value: float) -> Sum:
    """A number."""
    return Sum((((), value),)) if value else Sum()


def tensor(index: int, *, varies: bool = True) -> Sum:
    """The tensor that is known as ``index``; ``varies`` tells whether it does along the last dimension."""
    return _of(Atom("leaf", None, index, varies))


def add(*parts: Sum) -> Sum:
    """The sum of formulas."""
    found: dict[Product, float] = {}
    largest: dict[Product, float] = {}
    for part in parts:
        for product, coefficient in part.terms:
            found[product] = found.get(product, 0.0) + coefficient
            largest[product] = max(largest.get(product, 0.0), abs(coefficient))
    kept = {product: each for product, each in found.items() if abs(each) > _NOTHING * largest[product]}
    if len(kept) > _MOST:
        raise TooLongError
    return Sum(tuple(sorted(kept.items(), key=lambda item: _product_key(item[0]))))


def times(one: Sum, other: Sum) -> Sum:
    """The product of two formulas, multiplied out."""
    if len(one.terms) * len(other.terms) > _MOST * _MOST:
        raise TooLongError
    return add(*(_multiplied(*left, *right) for left in one.terms for right in other.terms))


def scaled(one: Sum, factor: float) -> Sum:
    """A formula times a number."""
    return times(one, number(factor))


def power(base: Sum, exponent: float) -> Sum:
    """A formula to a number.

    Raises:
        TooLongError: it is 0 to a negative number, or a root of a negative number.
    """
    whole = float(exponent).is_integer()
    if exponent == 0:
        return number(1.0)
    if not base.terms:
        raise TooLongError
    if len(base.terms) == 1:
        product, coefficient = base.terms[0]
        if whole or all(_is_positive(atom, each) for atom, each in product):
            if coefficient < 0 and not whole:
                raise TooLongError
            return times(
                number(coefficient**exponent),
                _collected([(atom, each * exponent) for atom, each in product]),
            )
    if whole and 0 < exponent <= 4:
        found = base
        for _ in range(int(exponent) - 1):
            found = times(found, base)
        return found
    first = base.terms[0][1]
    factor = first if whole else abs(first)
    inner = scaled(base, 1 / factor)
    logistic = _logistic_argument(inner) if exponent == -1 else None
    if logistic is not None:
        return scaled(sigmoid(logistic), 1 / factor)
    return Sum(((((Atom("sum", inner, varies=inner.varies), exponent),), factor**exponent),))


def _logistic_argument(inner: Sum) -> Sum | None:
    """``u`` of ``1 + exp(-u)``."""
    if len(inner.terms) != 2 or inner.constant != 1.0:
        return None
    (product, coefficient) = next(term for term in inner.terms if term[0])
    if coefficient != 1.0 or len(product) != 1 or product[0][0].kind != "exp" or product[0][1] != 1:
        return None
    of = product[0][0].of
    assert of is not None
    return scaled(of, -1)


def exp(of: Sum) -> Sum:
    """e to a formula."""
    return _function("exp", of)


def sigmoid(of: Sum) -> Sum:
    """The logistic function."""
    if of.terms and of.terms[0][1] < 0:
        return add(number(1.0), scaled(_function("sigmoid", scaled(of, -1)), -1))
    return _function("sigmoid", of)


def tanh(of: Sum) -> Sum:
    """The hyperbolic tangent."""
    return add(scaled(sigmoid(scaled(of, 2)), 2), number(-1.0))


def erf(of: Sum) -> Sum:
    """The error function."""
    if of.terms and of.terms[0][1] < 0:
        return scaled(_function("erf", scaled(of, -1)), -1)
    return _function("erf", of)


def silu(of: Sum) -> Sum:
    """``u sigmoid(u)``."""
    return times(of, sigmoid(of))


def gelu(of: Sum, approximate: str = "none") -> Sum:
    """``u Φ(u)``, exact or by tanh."""
    if approximate == "tanh":
        inner = scaled(add(of, scaled(power(of, 3), 0.044715)), math.sqrt(2 / math.pi))
        return times(scaled(of, 0.5), add(number(1.0), tanh(inner)))
    return times(scaled(of, 0.5), add(number(1.0), erf(scaled(of, 1 / math.sqrt(2)))))


def mean(of: Sum) -> Sum:
    """The mean over the last dimension; what does not vary along it stands before."""
    parts = []
    for product, coefficient in of.terms:
        inner = tuple(pair for pair in product if pair[0].varies)
        outer = Sum(((tuple(pair for pair in product if not pair[0].varies), coefficient),))
        parts.append(times(outer, _of(Atom("mean", Sum(((inner, 1.0),)), varies=False))) if inner else outer)
    return add(*parts)


def close(one: Sum, other: Sum, tolerance: float = 1e-6) -> bool:
    """Whether two formulas have the same terms, with coefficients that agree relatively to ``tolerance``."""
    if len(one.terms) != len(other.terms):
        return False
    left = list(other.terms)
    for product, coefficient in one.terms:
        for index, (theirs, number_) in enumerate(left):
            if math.isclose(coefficient, number_, rel_tol=tolerance) and _close_products(product, theirs, tolerance):
                del left[index]
                break
        else:
            return False
    return True


def _close_products(one: Product, other: Product, tolerance: float) -> bool:
    return len(one) == len(other) and all(
        any(exponent == theirs and _close_atoms(atom, each, tolerance) for each, theirs in other)
        for atom, exponent in one
    )


def _close_atoms(one: Atom, other: Atom, tolerance: float) -> bool:
    if one.kind != other.kind or one.of is None or other.of is None:
        return one.key == other.key
    return close(one.of, other.of, tolerance)


def _function(kind: str, of: Sum) -> Sum:
    return _of(Atom(kind, of, varies=of.varies))


def _of(atom: Atom) -> Sum:
    return Sum(((((atom, 1.0),), 1.0),))


def _multiplied(one: Product, factor: float, other: Product, by: float) -> Sum:
    terms = _collected([*one, *other]).terms
    return Sum(tuple((product, coefficient * factor * by) for product, coefficient in terms))


def _collected(factors: list[tuple[Atom, float]]) -> Sum:
    """A product with equal atoms put together; a sum whose exponent becomes whole is multiplied out."""
    exponents: dict[Atom, float] = {}
    for atom, exponent in factors:
        exponents[atom] = exponents.get(atom, 0.0) + exponent
    simple: list[tuple[Atom, float]] = []
    sums: list[Sum] = []
    for atom, exponent in exponents.items():
        if atom.kind == "sum" and atom.of is not None and exponent > 0 and float(exponent).is_integer():
            sums.append(power(atom.of, exponent))
        elif exponent:
            simple.append((atom, exponent))
    found = Sum(((tuple(sorted(simple, key=_factor_key)), 1.0),))
    for each in sums:
        found = times(found, each)
    return found


def _is_positive(atom: Atom, exponent: float) -> bool:
    """Whether a power of an atom is never negative, so that a root of it may be taken apart from other factors."""
    if not float(exponent).is_integer() or atom.kind in {"exp", "sigmoid"}:
        return True
    if atom.kind != "mean" or atom.of is None:
        return False
    (product, coefficient) = atom.of.terms[0]
    return len(atom.of.terms) == 1 and coefficient > 0 and all(each % 2 == 0 for _, each in product)


def _varies(product: Product) -> bool:
    return any(atom.varies for atom, _ in product)


def _leaves(atom: Atom) -> set[int]:
    return {atom.leaf} if atom.of is None else atom.of.leaves


def _factor_key(factor: tuple[Atom, float]) -> str:
    return f"{factor[0].key}^{factor[1]:.9g}"


def _product_key(product: Product) -> str:
    return "*".join(_factor_key(factor) for factor in product)
