"""From measured steps at small batch sizes to the memory of a step at any batch size.

Sizes of tensors are products of dimensions, so a block is constant (a weight), linear (an activation) or quadratic
(the logits of a contrastive loss, batch x batch). Floating point would turn an exact line into one with a trace of a
square in it, which is megabytes at the batch sizes that are asked for.

Every block gets a size as a function of the batch size, and the step's whole sequence of births and deaths is replayed
with these sizes. So the moment of the peak may move: at small batches the optimizer's step or the parameters rule, at
large ones the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gradscope.fitting.align import Alignment, BatchRun, align, running_total
from gradscope.tables import IntColumn, MemoryCategory


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


_MODEL = frozenset({MemoryCategory.PARAMETER, MemoryCategory.BUFFER, MemoryCategory.GRADIENT, MemoryCategory.OPTIMIZER})
# Where the remainder is more than this share of the peak, its moments are too coarse to rely on the replay alone: peaks
# that follow a curve themselves are the least that is predicted.
_COARSE = 0.01


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of highest use at one batch size; the parts add up to the peak."""

    batch_size: int
    peak_bytes: int
    saved_bytes: int  # activations saved for backward
    model_bytes: int  # parameters, buffers, gradients, optimizer state
    rest_bytes: int  # inputs, temporaries, gradients of activations, and what could not be matched
    unmatched_bytes: int  # part of the rest: remainder between the runs, or sizes that follow no curve


class Forecast:
    """The memory of a step as a function of the batch size.

    Args:
        runs: steps measured at two or three batch sizes.
        slack: bytes by which the allocator rounds, see :func:`gradscope.fitting.predict.through`.
    """

    def __init__(self, runs: Sequence[BatchRun], slack: int = 0) -> None:
        ordered = sorted(runs, key=lambda run: run.batch_size)
        self.alignment: Alignment = align(ordered)
        found = self.alignment
        blocks = found.reference.blocks
        self._events = blocks.events
        self._born, self._died = blocks.born[found.rows], blocks.died[found.rows]
        self._curves = Curves(found.batch_sizes, found.bytes, slack)
        category = np.array(blocks.category, dtype=object)[found.rows]
        self._saved = category == MemoryCategory.SAVED
        self._model = np.isin(category, list(_MODEL)) if len(category) else np.zeros(0, np.bool_)
        self._layer = blocks.layer[found.rows]
        self._peaks = through([(run.batch_size, run.peak_bytes) for run in ordered], slack)

    def peak(self, batch_size: int, more_saved: int = 0) -> Peak:
        """The peak at ``batch_size``.

        Args:
            more_saved: bytes that backward needs beyond what the curves say (less, where negative): they are born and
                die in step with the saved activations.
        """
        sizes = self._curves.at(batch_size)
        remainder = self._remainder(batch_size)
        total = self._replayed(sizes) + remainder
        extra = self._extra(more_saved, sizes)
        moment = int(np.argmax(total + extra))
        alive = (self._born < moment) & (self._died >= moment)
        saved_bytes = int(sizes[alive & self._saved].sum()) + int(extra[moment])
        model_bytes = int(sizes[alive & self._model].sum())
        peak = int(total[moment] + extra[moment])
        unmatched = int(remainder[moment]) + int(sizes[alive & ~self._curves.exact].sum())
        if self._peaks.exact and remainder[moment] > _COARSE * peak:
            missed = max(self._peaks.at(batch_size) + more_saved - peak, 0)
            peak, unmatched = peak + missed, unmatched + missed
        return Peak(
            batch_size=batch_size,
            peak_bytes=peak,
            saved_bytes=saved_bytes,
            model_bytes=model_bytes,
            rest_bytes=peak - saved_bytes - model_bytes,
            unmatched_bytes=unmatched,
        )

    def saved_growth(self, batch_size: int) -> dict[str | None, int]:
        """Bytes that each layer keeps for backward for the last of ``batch_size`` samples; key None: no layer."""
        layers = self.alignment.reference.layers
        sizes = self._curves.at(batch_size) - self._curves.at(batch_size - 1)
        growth: dict[str | None, int] = {}
        for row in np.flatnonzero(self._saved & (sizes != 0)).tolist():
            number = int(self._layer[row])
            layer = layers[number] if number >= 0 else None
            growth[layer] = growth.get(layer, 0) + int(sizes[row])
        return growth

    def _extra(self, more_saved: int, sizes: IntColumn) -> IntColumn:
        """A correction at each moment: in proportion to the saved activations, or all the time where there are none."""
        if not more_saved:
            return np.zeros(self._events + 1, np.int64)
        saved = self._replayed(np.where(self._saved, sizes, 0))
        if saved.max() <= 0:
            return np.full(self._events + 1, max(more_saved, 0), np.int64)
        return np.rint(saved * (more_saved / saved.max())).astype(np.int64)

    def _replayed(self, sizes: IntColumn) -> IntColumn:
        return running_total(self._events, self._born, self._died, sizes)

    def _remainder(self, batch_size: int) -> IntColumn:
        """The remainder by its trend: beyond the measured sizes that of the last two, never falling, and no faster
        than in proportion to the batch."""
        sizes, measured = self.alignment.batch_sizes, self.alignment.remainder
        if not measured.any():
            return measured[-1]
        before, last = sizes[-2:]
        if batch_size >= last:
            trend = measured[-1] + (measured[-1] - measured[-2]) * ((batch_size - last) / (last - before))
            return np.rint(np.clip(trend, measured[-1], measured[-1] * (batch_size / last))).astype(np.int64)
        right = max(int(np.searchsorted(sizes, batch_size)), 1)
        low, high = sizes[right - 1], sizes[right]
        part = max(batch_size - low, 0) / (high - low)
        return np.rint(measured[right - 1] + (measured[right] - measured[right - 1]) * part).astype(np.int64)
