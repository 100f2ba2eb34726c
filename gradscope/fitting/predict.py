"""From measured steps at small batch sizes to the memory of a step at any batch size.

Every block gets a size as a function of the batch size, and the step's whole sequence of births and deaths is replayed
with these sizes. So the moment of the peak may move: at small batches the optimizer's step or the parameters rule, at
large ones the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.fitting.align import Alignment, BatchRun, align, running_total
from gradscope.fitting.polynomial import Curves, through
from gradscope.tables import IntColumn, MemoryCategory

_MODEL = frozenset({MemoryCategory.PARAMETER, MemoryCategory.BUFFER, MemoryCategory.GRADIENT, MemoryCategory.OPTIMIZER})
# Where the remainder is more than this share of the peak, its moments are too coarse to rely on the replay alone: peaks
# that follow a curve themselves are the least that is predicted.
_COARSE = 0.01


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of highest use at one batch size; the parts add up to the peak."""

    batch_size: int
    peak_bytes: int
    saved_bytes: int  # activations kept for backward
    model_bytes: int  # parameters, buffers, gradients, optimizer state
    rest_bytes: int  # inputs, temporaries, gradients of activations, and what could not be matched
    unmatched_bytes: int  # part of the rest: remainder between the runs, or sizes that follow no curve


class Forecast:
    """The memory of a step as a function of the batch size.

    Args:
        runs: steps measured at two or three batch sizes.
        slack: bytes by which the allocator rounds, see :func:`gradscope.fitting.polynomial.through`.
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
