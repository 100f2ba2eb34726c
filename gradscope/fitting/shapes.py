"""The shapes of a batch as a law of its size, read off the batches of a few sizes: a batch without any data."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from gradscope.errors import WorkloadError
from gradscope.fitting.leaves import leaves, mapped


class UnknownShapeError(Exception):
    """The batch of some size cannot be made from its shapes; the message says why, without a full stop."""


class BatchShapes:
    """What batches of all sizes look like. Nothing of a batch but its shapes is kept.

    Args:
        target: for messages.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._seen: dict[int, dict[str, Any]] = {}  # batch size -> leaf's name -> a tensor without data, or a value
        self._devices: dict[str, torch.device] = {}
        self._structure: Any = None

    def note(self, size: int, batch: Any) -> None:
        """Read the batch of ``size`` samples; two or more sizes make a law."""
        self._structure = mapped(batch, lambda _, leaf: _without_data(leaf))
        self._seen[size] = dict(leaves(self._structure))
        self._devices = {name: leaf.device for name, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)}

    def require_growth(self) -> None:
        """Raise :class:`WorkloadError` if the batches of all sizes are of the same shapes."""
        first, last = min(self._seen), max(self._seen)
        if _lengths(self._seen[first]) == _lengths(self._seen[last]):
            raise WorkloadError(
                f"{self._target}: the batches for batch_size={first} and batch_size={last} have the same shapes.\n"
                "Make a batch of as many samples as batch_size says."
            )

    def empty(self, size: int) -> Any:
        """The batch of ``size`` samples from ``torch.empty``; inside a ``FakeTensorMode`` it takes no memory.

        Raises:
            UnknownShapeError: shapes do not grow evenly, or something beside the tensors changes with the size.
        """
        return mapped(self._structure, lambda name, leaf: self._leaf(name, leaf, size))

    def _leaf(self, name: str, leaf: Any, size: int) -> Any:
        found = [seen.get(name) for seen in self._seen.values()]
        if not isinstance(leaf, torch.Tensor):
            if all(type(other) is type(leaf) and other == leaf for other in found):
                return leaf
            raise UnknownShapeError(f"{name} changes with the batch size")
        rows = [(*other.shape, *other.stride()) for other in found if isinstance(other, torch.Tensor)]
        if {len(row) for row in rows} != {2 * leaf.dim()} or len(rows) < len(found):
            raise UnknownShapeError(f"{name} has another number of dimensions at another batch size")
        numbers = [self._grown(name, values, size) for values in zip(*rows, strict=True)]
        shape, strides = numbers[: leaf.dim()], numbers[leaf.dim() :]
        made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=self._devices[name])
        return made.requires_grad_(leaf.requires_grad)

    def _grown(self, name: str, values: tuple[int, ...], size: int) -> int:
        """The number that was ``values`` at the sizes seen, at ``size``, if it grows evenly."""
        sizes = list(self._seen)
        slope = Fraction(values[-1] - values[0], sizes[-1] - sizes[0])
        if any(values[0] + slope * (known - sizes[0]) != value for known, value in zip(sizes, values, strict=True)):
            raise UnknownShapeError(f"the shape of {name} does not grow evenly with the batch size")
        return round(values[0] + slope * (size - sizes[0]))


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return made.requires_grad_(leaf.requires_grad)


def _lengths(found: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in found.values() if isinstance(leaf, torch.Tensor)]
