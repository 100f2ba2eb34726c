"""What a fit found, as plain data: FIT.json is these fields, and docs/fit.md says what they mean. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One batch size that was run."""

    batch_size: int
    peak_bytes: int
    predicted_bytes: int
    use: str  # "prediction", or "check" for one that the prediction does not know


@dataclass(frozen=True, slots=True)
class FitRow:
    """The predicted peak at one batch size; saved, model and rest add up to it."""

    batch_size: int
    peak_bytes: int
    saved_bytes: int  # activations that backward needs
    model_bytes: int  # parameters, buffers, gradients, optimizer state
    rest_bytes: int  # inputs, temporaries, gradients of activations
    check: str  # "agrees", "corrected" or "unchecked": what fake tensors say of this size
    correction_bytes: int = 0  # by which saved and peak were corrected
    fits: str | None = None  # "yes", "no" or "unsure"; None: no device memory was given
    low_bytes: int | None = None  # range of the peak, where memory does not follow the batch size smoothly
    high_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LayerGrowth:
    """What one layer keeps for backward for each further sample."""

    path: str
    class_name: str  # "class" in FIT.json
    parent: str | None
    parameters: int  # elements of the layer's own parameters
    saved_bytes_per_sample: int  # self
    saved_total_bytes_per_sample: int  # with the layers below it


@dataclass(frozen=True, slots=True)
class FitData:
    """A finished fit."""

    gradscope: str
    target: str
    environment: Mapping[str, Any]
    model: str
    parameters: int
    optimizer: str | None  # class of the optimizer that stepped; None: the step ends with backward
    measured: Sequence[MeasuredRow]
    deviation: float | None  # of the prediction from the measured peak at the check, over the latter; None: no check
    unmatched_bytes: int  # part of the largest listed peak that no curve explains
    rows: Sequence[FitRow]
    layers: Sequence[LayerGrowth]
    outside_bytes_per_sample: int  # as the layers' saved bytes: of nodes outside every module
    growth_at: int  # batch size whose last sample the layers' growth is
    adam_bytes: int | None = None  # what Adam's state would add, where the workload has no optimizer
    gradient_bytes: int | None = None  # what gradients kept through the forward would add to saved activations
    device_memory_bytes: int | None = None
    device_memory: str | None = None  # as the user wrote it, or the device's name
    reserve_bytes: int | None = None
    reserve: str | None = None
    largest: int | None = None  # largest batch size that fits; None: none does, or no device memory was given
    largest_peak_bytes: int | None = None
    unlimited: bool = False  # the largest is where the search ended
    smallest_peak_bytes: int | None = None  # of batch size 1, where not even that fits
    unchecked: str | None = None  # why fake tensors could not check
    notes: Sequence[str] = field(default_factory=tuple)
    schema_version: int = SCHEMA_VERSION

    @property
    def budget_bytes(self) -> int | None:
        """What the step's tensors may take."""
        if self.device_memory_bytes is None:
            return None
        return self.device_memory_bytes - (self.reserve_bytes or 0)
