"""What a fit found, as plain data: FIT.json is these fields, and docs/fit.md says what they mean. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradscope.report.fold import FoldedNode, build_tree
from gradscope.tables import LayerRow, ModuleInfo

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


def layer_growth(infos: Sequence[ModuleInfo], growth: Mapping[str | None, int]) -> tuple[LayerGrowth, ...]:
    """One row a layer, in the order of ``infos``, from the bytes of each path."""
    totals = {info.path: growth.get(info.path, 0) for info in infos}
    for info in reversed(infos):  # parents come before their children
        if info.parent is not None:
            totals[info.parent] += totals[info.path]
    return tuple(
        LayerGrowth(
            info.path, info.class_name, info.parent, info.parameters, growth.get(info.path, 0), totals[info.path]
        )
        for info in infos
    )


@dataclass(frozen=True, slots=True)
class FoldedGrowth:
    """Layers of one kind, repeats summed."""

    address: str  # "transformer.h.*.attn"
    class_name: str
    layers: int
    bytes: int  # self


def folded_growth(layers: Sequence[LayerGrowth], model: str) -> list[FoldedGrowth]:
    """Layers that keep more with each sample by themselves, largest first; repeated blocks are one."""
    nodes = [node for root in build_tree([_row(layer) for layer in layers], 0, model) for node in root.walk()]
    grown = [_folded(node, model) for node in nodes if node.own.saved_bytes]
    return sorted(grown, key=lambda item: -item.bytes)


def _folded(node: FoldedNode, model: str) -> FoldedGrowth:
    return FoldedGrowth(
        node.address or node.label or model, node.class_name, len(node.paths), node.own.saved_bytes or 0
    )


def _row(layer: LayerGrowth) -> LayerRow:
    return LayerRow(
        path=layer.path,
        class_name=layer.class_name,
        parent=layer.parent,
        calls=1,
        parameters=layer.parameters,
        source=None,
        forward_self_ns=0,
        forward_total_ns=0,
        backward_self_ns=0,
        backward_total_ns=0,
        recompute_ns=0,
        accumulate_ns=0,
        gradient_sum_ns=0,
        backward_share=0.0,
        saved_bytes=layer.saved_bytes_per_sample,
        saved_total_bytes=layer.saved_total_bytes_per_sample,
    )
