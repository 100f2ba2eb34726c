"""Compares a forecast with what the model does, on fake tensors, at batch sizes that are not run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradscope.fitting.fake import UncheckedError, held_by_forward
from gradscope.fitting.polynomial import through
from gradscope.fitting.shapes import BatchShapes
from gradscope.workload import Workload

# Differences below this share of what a forward keeps are its loss and other small things, and corrected silently.
TOLERANCE = 0.01


class FakeCheck:
    """What forward keeps at any batch size against what the measured sizes lead to expect.

    Fake tensors are compared with fake tensors: where their operations differ a little from the real ones (another
    attention kernel), they do at every size.

    Args:
        workload: its batch is not looked at.
        shapes: of the batches of all sizes.
        measured: batch sizes that the forecast is made from.
        device: where the model is moved to.

    Attributes:
        unchecked: why nothing can be compared; None where it can.
    """

    def __init__(
        self, workload: Workload, shapes: BatchShapes, measured: Sequence[int], device: torch.device | None = None
    ) -> None:
        self._workload, self._shapes, self._device = workload, shapes, device
        self._held: dict[int, int | UncheckedError] = {}
        self.unchecked: str | None = None
        points = []
        for size in sorted(measured):
            held = self._at(size)
            if isinstance(held, UncheckedError):
                self.unchecked = str(held)
                return
            points.append((size, held))
        self._expected = through(points)

    def difference(self, size: int) -> int:
        """Bytes that forward keeps at ``size`` beyond what was expected; negative where it keeps less.

        Raises:
            UncheckedError: see :func:`~gradscope.fitting.fake.held_by_forward`.
        """
        if self.unchecked is not None:
            raise UncheckedError(self.unchecked)
        held = self._at(size)
        if isinstance(held, UncheckedError):
            raise held
        return held - self._expected.at(size)

    def agrees(self, size: int) -> bool:
        """Check that :meth:`difference` is too small to speak of."""
        return abs(self.difference(size)) <= TOLERANCE * self._expected.at(size)

    def _at(self, size: int) -> int | UncheckedError:
        found = self._held.get(size)
        if found is None:
            try:
                found = held_by_forward(self._workload, self._shapes, size, self._device)
            except UncheckedError as reason:
                found = reason
            self._held[size] = found
        return found
