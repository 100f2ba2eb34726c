"""How a size in bytes depends on the batch size: a polynomial of degree two at most, in exact arithmetic.

Sizes of tensors are products of dimensions, so a block is constant (a weight), linear (an activation) or quadratic
(the logits of a contrastive loss, batch x batch). Floating point would turn an exact line into one with a trace of a
square in it, which is megabytes at the batch sizes that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gradscope.tables import IntColumn


@dataclass(frozen=True, slots=True)
class Polynomial:
    """``constant + linear * b + quadratic * b**2``.

    ``exact`` is False where the points lie on no such curve that sizes of memory follow: it is their mean growth then.
    """

    constant: Fraction
    linear: Fraction
    quadratic: Fraction
    exact: bool = True

    def at(self, batch_size: int) -> int:
        """The value at ``batch_size``, in whole bytes, never negative."""
        value = self.constant + batch_size * (self.linear + batch_size * self.quadratic)
        return max(round(value), 0)


def through(points: Sequence[tuple[int, int]], slack: int = 0) -> Polynomial:
    """The polynomial of the lowest degree through all ``points``.

    Args:
        points: (batch size, bytes), two or three with different batch sizes in ascending order.
        slack: bytes that the sizes may be off a line, as they are where an allocator rounds them up.

    A square must be one that a number of bytes can be: of whole bytes at every batch size, and growing from the first
    on. Else the points are noise around the line through the outer two.
    """
    (low, first), (high, last) = points[0], points[-1]
    slope = Fraction(last - first, high - low)
    line = Polynomial(first - slope * low, slope, Fraction(0))
    between = points[1:-1]
    if all(abs(line.constant + slope * size - value) <= slack for size, value in between):
        if abs(last - first) <= slack and all(abs(value - last) <= slack for _, value in points):
            return Polynomial(Fraction(last), Fraction(0), Fraction(0))
        return line
    curve = _parabola(*points)
    if _is_size(curve):
        return curve
    return Polynomial(line.constant, line.linear, line.quadratic, exact=False)


def _parabola(one: tuple[int, int], two: tuple[int, int], three: tuple[int, int]) -> Polynomial:
    (x0, y0), (x1, y1), (x2, y2) = one, two, three
    first = Fraction(y1 - y0, x1 - x0)
    second = (Fraction(y2 - y1, x2 - x1) - first) / (x2 - x0)
    return Polynomial(y0 - first * x0 + second * x0 * x1, first - second * (x0 + x1), second)


def _is_size(curve: Polynomial) -> bool:
    growth = curve.linear + curve.quadratic  # from 0 to 1; each step further adds twice the square more
    whole = all(value.denominator == 1 for value in (curve.constant, growth, 2 * curve.quadratic))
    return whole and curve.quadratic > 0 and curve.constant >= 0 and growth + 2 * curve.quadratic >= 0


class Curves:
    """Polynomials of many blocks at once, one fit for each distinct row of sizes.

    Args:
        batch_sizes: ascending, two or three.
        measured: bytes, shape (blocks, batch sizes).
        slack: see :func:`through`.
    """

    def __init__(self, batch_sizes: Sequence[int], measured: IntColumn, slack: int = 0) -> None:
        rows, self._which = np.unique(measured.reshape(-1, len(batch_sizes)), axis=0, return_inverse=True)
        self._which = self._which.reshape(-1)
        self._curves = [
            through(list(zip(batch_sizes, (int(value) for value in row), strict=True)), slack) for row in rows
        ]

    def at(self, batch_size: int) -> IntColumn:
        """Bytes of every block at ``batch_size``."""
        return np.array([curve.at(batch_size) for curve in self._curves], np.int64)[self._which]

    @property
    def exact(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell of each block whether it follows its polynomial at all measured batch sizes."""
        return np.array([curve.exact for curve in self._curves], np.bool_)[self._which]
