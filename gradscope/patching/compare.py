"""Return whether what a replacement computes is as good as what the original computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.patching.unit import GRADIENT, Outcome

# A replacement may be off by twice what the original is off: both round, in another order.
TIMES = 2.0

# What is smaller than this share of the largest of its like may be off by one rounding of that share.
_SMALL = 0.1


@dataclass(frozen=True)
class Distance:
    """How far one output or gradient is from the truth, ``|x - truth| / |truth|`` in the Euclidean norm."""

    name: str
    new: float
    original: float
    limit: float

    @property
    def within(self) -> bool:
        """Return whether the replacement is as good as the original."""
        return self.new <= self.limit


@dataclass(frozen=True)
class Errors:
    """The distances of all outputs and gradients."""

    distances: tuple[Distance, ...]

    @property
    def worst(self) -> Distance | None:
        """The one that is furthest over its limit, or nearest to it."""
        return max(self.distances, key=lambda each: each.new - each.limit, default=None)

    @property
    def within(self) -> bool:
        """Return whether the replacement is as good in all."""
        return all(each.within for each in self.distances)

    def largest(self, *, original: bool = False) -> float:
        """The largest distance of a gradient; where there is none, of an output."""
        gradients = [each for each in self.distances if each.name.startswith(GRADIENT)]
        return max((each.original if original else each.new for each in gradients or self.distances), default=0.0)


def compare(new: Outcome, original: Outcome, truth: Outcome) -> Errors:
    """The distances of ``new`` and ``original`` from ``truth``.

    Raises:
        ValueError: an output or gradient is missing on one side, or has another shape or dtype.
    """
    if set(new) != set(original):
        missing = sorted(set(new) ^ set(original))
        raise ValueError(f"{missing[0]} exists on one side only")
    sizes = {
        kind: max((_rms(true) for name, true in truth.items() if name.startswith(GRADIENT) is kind), default=0.0)
        for kind in (False, True)
    }
    found = []
    for name, value in original.items():
        other, true = new[name], truth.get(name)
        if other.shape != value.shape or other.dtype != value.dtype:
            raise ValueError(f"{name} is {_kind(other)}, it was {_kind(value)}")
        if true is None:
            raise ValueError(f"{name} does not exist in higher precision")
        found.append(_of(name, other, value, true, sizes[name.startswith(GRADIENT)]))
    return Errors(tuple(found))


def _of(name: str, new: Tensor, original: Tensor, truth: Tensor, size: float) -> Distance:
    """One tensor's; of one that is nearly 0 beside its like, relative to these.

    A bias that a softmax takes no notice of has the gradient 0: what a float32 run gives for it is rounding alone.
    """
    finite = torch.isfinite(new) & torch.isfinite(original)
    alike = finite | (new == original) | (new.isnan() & original.isnan())
    if not bool(alike.all()):
        return Distance(name, float("inf"), 0.0, 0.0)
    scale = max(_norm(truth), _SMALL * size * truth.numel() ** 0.5)
    mine, theirs = _distance(new, truth, scale), _distance(original, truth, scale)
    # Where the original happens to be exact: the rounding of one more operation.
    return Distance(name, mine, theirs, TIMES * theirs + torch.finfo(original.dtype).eps)


def _distance(value: Tensor, truth: Tensor, scale: float) -> float:
    """In the Euclidean norm. What is not finite in both does not count."""
    value, truth = value.double(), truth.double()
    finite = torch.isfinite(truth) & torch.isfinite(value)
    apart = float((value[finite] - truth[finite]).norm())
    return apart / scale if scale > 0 else apart


def _norm(tensor: Tensor) -> float:
    return float(tensor.double()[torch.isfinite(tensor)].norm())


def _rms(tensor: Tensor) -> float:
    return _norm(tensor) / max(tensor.numel(), 1) ** 0.5


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
