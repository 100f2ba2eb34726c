"""Memory: keys of RUN.json's ``memory``. Sizes are bytes, times nanoseconds from the start of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class HolderRow:
    """One owner's part of the live set at the peak in one category; the parts add up to the peak exactly."""

    owner: str | None  # path of a layer; None: outside every module
    category: str  # value of MemoryCategory
    bytes: int


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Storages that one kind of node in one layer was the first to keep for backward."""

    layer: str | None
    line: str | None  # "model.py:52"
    node: str  # "SoftmaxBackward0"
    what: str  # "output", "self", "mat2": the node's own name for it
    shape: str  # "8x12x1024x1024", of the tensor that was saved; the storage may be larger
    dtype: str  # "float32"
    count: int
    bytes: int  # of whole storages, each counted once in the step; summed over its backward passes
    at_peak_bytes: int | None = None  # of these, alive at the peak and waiting for their node; without the batch


@dataclass(frozen=True, slots=True)
class HeldRow:
    """Activations alive when a backward pass began, though no node of it needs them."""

    layer: str | None
    line: str | None
    op: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Copies made by one op of one line: what contiguous, clone, cat, reshape and the like allocated and filled."""

    layer: str | None
    line: str | None
    phase: str  # "forward", "backward", "recompute", "optimizer", "other"
    op: str  # the outermost op that user code or a node called: "aten::reshape", "aten::matmul"
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RetainedRow:
    """Memory of a step that is alive at its end and belongs to no parameter, gradient, buffer or optimizer."""

    layer: str | None
    line: str | None
    op: str
    phase: str
    count: int
    bytes: int
    grows: bool  # a leak: the step before left the same, and each of at least three steps as many storages more


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Bytes allocated at one moment of the step that measured memory."""

    ns: int  # from the start of the step
    bytes: int


@dataclass(frozen=True, slots=True)
class CategoryCourse:
    """Bytes of one category over the step. At each point, those of all categories add up to the point's bytes."""

    category: str  # value of MemoryCategory
    bytes: Sequence[int]  # at each point of the timeline


@dataclass(frozen=True, slots=True)
class OwnerCourse:
    """Bytes over the step of what one layer owns, or all repeats of it together."""

    owner: str | None  # path, numbers in it as "*": "h.*.attn"; None: nobody of the model's
    bytes: Sequence[int]  # at each point of the timeline


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """One stretch of time in which a layer itself ran, and none of the layers below it."""

    layer: str
    phase: str  # "forward", "backward", "recompute"
    start_ns: int  # from the start of the step that measured memory
    end_ns: int


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stretch of the step that measured memory."""

    phase: str  # "forward", "backward", "optimizer", "other"
    start_ns: int
    end_ns: int


# Of the peak, with each step: what is called a leak, whatever it may be kept for. Less may be numbers for a curve.
LEAK_SHARE = 0.0001


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of one step on one device. Bytes of torch's own allocator: what Python holds besides is not in it."""

    device: str  # "cpu", "cuda:0"
    peak_bytes: int
    peak_ns: int  # from the start of the step
    peak_phase: str  # "forward", "backward", "recompute", "optimizer", "other"
    peak_layer: str | None  # what ran at that moment; None: nothing of the model's
    peak_op: str
    at_peak: Sequence[HolderRow]  # largest first; adds up to peak_bytes
    start_bytes: int  # allocated when the step began
    end_bytes: int  # allocated when it ended
    timeline: Sequence[TimelinePoint]  # thinned; every phase keeps its highest and lowest points
    phases: Sequence[PhaseSpan]
    saved_bytes: int  # sum of SavedRow.bytes, over all backward passes of the step
    saved: Sequence[SavedRow]  # largest first
    held_bytes: int
    held: Sequence[HeldRow]
    copied_bytes: int
    copies: Sequence[CopyRow]
    allocations: int  # of the whole step
    step_allocated_bytes: int  # sum over these allocations
    retained_after_step_bytes: int
    retained: Sequence[RetainedRow]
    allocated_bytes: int | None = None  # CUDA: the allocator's own figure at the peak
    reserved_bytes: int | None = None  # CUDA: what it had taken from the device by then
    outside_allocator_bytes: int | None = None  # CUDA: in use on the device beyond that: context, libraries, others
    device_total_bytes: int | None = None  # CUDA
    categories: Sequence[CategoryCourse] | None = None  # the timeline by category; None: written by an older version
    owners: Sequence[OwnerCourse] | None = None  # the timeline by owner, of those that hold most; None: as categories
    spans: Sequence[LayerSpan] | None = None  # in order of time, none overlapping another; None: as categories
    spans_left_out: int | None = None  # shorter ones, for which there was no room
    saved_at_peak_bytes: int | None = None  # sum of SavedRow.at_peak_bytes; None: as categories
    held_at_peak_bytes: int | None = None  # of what HeldRow counts, alive at the peak
    backward_passes: int | None = None  # of the step, those of gradient accumulation each; None: as categories


class MemoryCategory(StrEnum):
    """What a block of memory is, in the order in which these claim a block that could be several."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    GRADIENT = "gradients"  # .grad of parameters and other leaves
    OPTIMIZER = "optimizer state"
    INPUT = "inputs"  # the batch
    SAVED = "saved activations"  # saved for backward
    ACTIVATION = "other activations"  # alive when backward began, or still after it, though no node needs them
    ACTIVATION_GRADIENT = "activation gradients"  # made in backward, outliving the node that made them
    TEMPORARY = "temporaries"  # gone before the next phase needs them
    OTHER = "other tensors"  # alive before the step, and not the model's: a dataset, a second model
