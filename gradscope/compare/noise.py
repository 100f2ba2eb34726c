"""Tell whether two means differ by more than noise: Welch's test, and a floor from the spread of whole steps.

A difference of means is real when it exceeds both

* ``t · sqrt(s₁²/n₁ + s₂²/n₂)``: Welch's unequal variances t-test (B. L. Welch, "The generalization of 'Student's'
  problem when several different population variances are involved", Biometrika 34, 1947) with the degrees of freedom
  of Welch and Satterthwaite, rounded down. ``t`` is the two-sided quantile for :data:`FALSE_ALARMS` divided by the
  number of rows that are tested together (Bonferroni), so that a whole table of them names a change where there is
  none in at most one of twenty comparisons;
* the floor: one standard deviation of a whole step, as a share of the value. The steps of one process share its memory
  layout, its clock and its neighbours on the machine, so averaging more of them does not bring two runs closer
  together (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). What is smaller than the
  scatter of single steps is not claimed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# The usual level of significance, for all rows of a table together.
FALSE_ALARMS = 0.05
# The series has half as many terms; beyond it the value changes by less than a hundredth, and is here the larger one.
_MOST_FREEDOM = 1_000
_ROUNDING = 1e-9  # 7.999999999999999 degrees of freedom are 8


@dataclass(frozen=True, slots=True)
class Measured:
    """A mean over ``steps`` steps, and the sample standard deviation of one of them, both in ns."""

    mean: float
    deviation: float
    steps: int


@dataclass(frozen=True, slots=True)
class Error:
    """The squared standard error of a sum of independent means, in ns², and what its degrees of freedom follow from."""

    variance: float
    fourth: float  # sum of variance² / (steps - 1) over the means

    @classmethod
    def of(cls, *means: Measured) -> Error:
        """The error of the sum, or of the difference, of ``means``; each of at least two steps."""
        variances = [one.deviation**2 / one.steps for one in means]
        pairs = zip(variances, means, strict=True)
        return cls(sum(variances), sum(variance**2 / (one.steps - 1) for variance, one in pairs))

    def plus(self, other: Error, weight: float = 1.0) -> Error:
        """The error of the sum with ``weight`` times what ``other`` is the error of."""
        return Error(self.variance + weight**2 * other.variance, self.fourth + weight**4 * other.fourth)

    def without(self, part: Error) -> Error:
        """The error of the same sum without one of its terms."""
        return Error(max(self.variance - part.variance, 0.0), max(self.fourth - part.fourth, 0.0))

    def limit_ns(self, rows: int) -> float:
        """What the sum exceeds by chance in one of twenty tables of ``rows`` sums that are zero."""
        if not self.variance or not self.fourth:
            return 0.0
        freedom = max(math.floor(self.variance**2 / self.fourth + _ROUNDING), 1)
        return t_quantile(FALSE_ALARMS / rows, freedom) * math.sqrt(self.variance)


def limit_ns(before: Measured, after: Measured, floor: float, rows: int) -> int | None:
    """The largest difference of the two means that may be noise; ``None`` where one step says nothing about noise.

    Args:
        floor: one standard deviation of a whole step over its mean, the larger of both runs'.
        rows: how many differences are tested together, at least 1.
    """
    if min(before.steps, after.steps) < 2:
        return None
    least = floor * max(abs(before.mean), abs(after.mean))
    return math.floor(max(Error.of(before, after).limit_ns(rows), least))


def odd_one(pairs: Sequence[tuple[Measured, Measured]], floor: float) -> int | None:
    """The repeat whose change differs most from the mean change of the others; ``None`` where all changed alike.

    Args:
        pairs: each repeat before and after, at least two of them.
        floor: as in :func:`limit_ns`.
    """
    if any(min(before.steps, after.steps) < 2 for before, after in pairs):
        return None
    changes = [after.mean - before.mean for before, after in pairs]
    errors = [Error.of(before, after) for before, after in pairs]
    all_errors = functools.reduce(Error.plus, errors)
    others = len(pairs) - 1
    oddest, furthest = None, 0.0
    for i, (before, after) in enumerate(pairs):
        apart = abs(changes[i] - (sum(changes) - changes[i]) / others)
        error = errors[i].plus(all_errors.without(errors[i]), 1 / others)
        limit = max(error.limit_ns(len(pairs)), floor * max(before.mean, after.mean))
        if apart > limit and apart - limit > furthest:
            oddest, furthest = i, apart - limit
    return oddest


@functools.cache
def t_quantile(alpha: float, freedom: int) -> float:
    """The value that Student's t of ``freedom`` degrees exceeds in absolute value with probability ``alpha``."""
    freedom = min(freedom, _MOST_FREEDOM)
    low, high = 0.0, math.pi / 2
    # The angle theta = atan(t / sqrt(freedom)) runs over a bounded range, so halving finds it to the last bit.
    while low < (middle := (low + high) / 2) < high:
        if 1 - _probability_within(middle, freedom) > alpha:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _probability_within(theta: float, freedom: int) -> float:
    """P(|T| < t): the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
