"""Types that every other part of gradscope imports; no logic beyond what the types promise.

Two families:

* bulk tables (:class:`EventTable`, :class:`CallTable`): numpy columns of equal length with interned
  names, one row an event or a module call. Made by ``capture`` and ``trace``, consumed by ``attribute``.
* results (:class:`LayerRow`, :class:`Ledger`, :class:`RunData` ...): frozen dataclasses, one field a key of
  RUN.json. Times are integer nanoseconds *per step* (mean over the measured steps), sizes are bytes.
  ``None`` means not measured and is left out of the JSON; ``0`` is a measured zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 1

IntColumn: TypeAlias = npt.NDArray[np.int64]
Int32Column: TypeAlias = npt.NDArray[np.int32]
Int8Column: TypeAlias = npt.NDArray[np.int8]


# --------------------------------------------------------------------------------------------------------------------
# Results: one field a key of RUN.json
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """How steady one quantity was over the measured steps, in ns."""

    min_ns: int
    median_ns: int
    max_ns: int
    std_ns: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One mean step. ``forward + backward + optimizer + other == wall`` exactly."""

    wall_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    other_ns: int  # between the phases: data loading, Python, zero_grad outside an optimizer, ...
    spread: Mapping[str, Spread]  # keys "wall", "forward", "backward"
    overhead: float | None  # median profiled step over median unprofiled step; None: not measured
    unprofiled_wall_ns: int | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the backward pass is made of. The parts add up to ``backward_ns`` exactly."""

    backward_ns: int
    layers_ns: int  # backward nodes of module calls: sum of LayerRow.backward_self_ns
    recompute_ns: int  # forward run again by activation checkpointing
    gradient_sum_ns: int  # adding the gradients of a value that has several users
    accumulate_ns: int  # AccumulateGrad: writing a parameter's .grad
    outside_modules_ns: int  # nodes made outside every module call (a functional loss, say)
    communication_ns: int  # collectives of DDP and FSDP
    engine_ns: int  # the autograd engine itself, and Python between its nodes
    unattributed_ns: int  # nodes whose forward was not seen

    PARTS = (
        "layers_ns",
        "recompute_ns",
        "gradient_sum_ns",
        "accumulate_ns",
        "outside_modules_ns",
        "communication_ns",
        "engine_ns",
        "unattributed_ns",
    )

    def parts_ns(self) -> int:
        """Sum of the parts; equal to ``backward_ns`` by construction and checked by :class:`RunData`."""
        return sum(getattr(self, name) for name in self.PARTS)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One module of the model, by path; ``""`` is the root. Self values unless the name says total.

    The columns ``backward_self_ns``, ``recompute_ns``, ``accumulate_ns`` and ``gradient_sum_ns`` are disjoint.
    ``backward_total_ns`` is the sum of these four over the layer and every layer below it, in the tree of paths.
    """

    path: str
    class_name: str  # "class" in RUN.json
    parent: str | None  # None for the root
    calls: float  # forward calls per step, recompute not counted
    parameters: int  # elements of the layer's own parameters
    source: str | None  # "model.py:52": where the class's forward is defined
    forward_self_ns: int
    forward_total_ns: int
    backward_self_ns: int
    backward_total_ns: int
    recompute_ns: int
    accumulate_ns: int
    gradient_sum_ns: int
    backward_share: float  # backward_total_ns / step.backward_ns, 0..1
    backward_self_steps_ns: Sequence[int] = ()  # backward_self_ns of each measured step: the layer's own spread
    tied: Sequence[str] = ()  # parameters this layer shares with others, as "path.name"
    device_ns: int | None = None  # kernels launched under the layer, forward and backward (CUDA)
    launch_ns: int | None = None  # CPU time of the layer's backward nodes (CUDA: launches)
    idle_ns: int | None = None  # part of backward_self_ns in which the device had nothing to do (CUDA)
    flops: int | None = None  # forward + backward
    forward_flops: int | None = None
    backward_flops: int | None = None
    bytes: int | None = None
    bound_by: str | None = None
    saved_bytes: int | None = None  # storages that this layer was the first to keep for backward
    saved_total_bytes: int | None = None  # the same, with the layers below it
    peak_bytes: int | None = None  # largest rise above what was allocated when it (or one of its nodes) was entered
    allocated_bytes: int | None = None  # forward and backward; self
    allocations: int | None = None
    forward_allocated_bytes: int | None = None
    forward_allocations: int | None = None
    backward_allocated_bytes: int | None = None
    backward_allocations: int | None = None
    copied_bytes: int | None = None  # allocated by contiguous, clone, cat, reshape and the like: see CopyRow


@dataclass(frozen=True, slots=True)
class LineRow:
    """A source line of the forward code and the backward time it caused."""

    file: str  # as given in the traceback; relative to the working folder where it lies below it
    line: int
    function: str
    text: str  # the line's source, stripped; "" where it cannot be read
    layer: str | None  # the layer that spent most backward time there; None: outside every module
    forward_ns: int
    backward_ns: int
    saved_bytes: int | None = None
    allocated_bytes: int | None = None  # forward and backward
    copied_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation of one layer in one phase. Summed over a layer and phase, ``self_ns`` is the layer's column."""

    layer: str | None  # None: outside every module
    phase: str  # "forward", "backward", "recompute", "gradient_sum", "accumulate", "communication", "engine", ...
    name: str  # "aten::mm", "AddmmBackward0", "(python)" for a module's time outside any op
    calls: float  # per step
    self_ns: int
    shape: str | None = None  # most frequent input shapes, e.g. "[8, 64] [64, 64]"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One device kernel of one layer in one phase (CUDA only)."""

    layer: str | None
    phase: str
    name: str
    calls: float
    device_ns: int


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """What was run and how."""

    target: str
    mode: Literal["model", "script", "loop"]
    steps: int  # measured steps
    warmup: int
    loss: Literal["given", "output", "mean of outputs"] | None  # None in script and loop mode
    model: str = ""  # class name of the root, or "Generator, Discriminator"
    parameters: int = 0  # elements, each shared parameter once
    events: int = 0  # profiler events read


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
    bytes: int  # of whole storages, each counted once in the step


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
    grows: bool  # what the step before left behind there is alive still: a leak


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Bytes allocated at one moment of the step that measured memory."""

    ns: int  # from the start of the step
    bytes: int


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stretch of the step that measured memory."""

    phase: str  # "forward", "backward", "optimizer", "other"
    start_ns: int
    end_ns: int


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
    saved_bytes: int  # sum of SavedRow.bytes
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


class MemoryCategory(StrEnum):
    """What a block of memory is, in the order in which these claim a block that could be several."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    GRADIENT = "gradients"  # .grad of parameters and other leaves
    OPTIMIZER = "optimizer state"
    INPUT = "inputs"  # the batch
    SAVED = "saved activations"  # kept for backward
    ACTIVATION = "other activations"  # alive when backward began, or still after it, though no node needs them
    ACTIVATION_GRADIENT = "activation gradients"  # made in backward, outliving the node that made them
    TEMPORARY = "temporaries"  # gone before the next phase needs them
    OTHER = "other tensors"  # alive before the step, and not the model's: a dataset, a second model


@dataclass(frozen=True, slots=True)
class Finding:
    """Why something is slow, and what to do."""

    rule: str
    severity: Literal["info", "warning", "critical"]
    layers: Sequence[str]
    line: str | None
    message: str
    evidence: str
    recipe: str | None = None
    predicted_saving_ns: int | None = None
    predicted_saving_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunData:
    """The whole of RUN.json. Construction checks that the numbers add up."""

    gradscope: str  # version that wrote it
    partial: bool
    environment: Mapping[str, Any]
    workload: WorkloadInfo
    step: StepTimes
    ledger: Ledger
    layers: Sequence[LayerRow]
    lines: Sequence[LineRow]
    ops: Sequence[OpRow]
    kernels: Sequence[KernelRow] = ()
    memory: MemoryInfo | None = None
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()  # what was not measured and why; what was estimated
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_conservation(self)


class ConservationError(AssertionError):
    """Numbers that must add up do not: a defect of gradscope, never of the user's model."""


def check_conservation(run: RunData) -> None:
    """Raise :class:`ConservationError` unless every sum that RUN.json promises holds exactly.

    Checked: the ledger's parts against ``backward_ns``; the step's phases against ``wall_ns``; each layer column
    against its ledger row; the totals of the roots against their parts.
    """
    step, ledger = run.step, run.ledger
    _require(ledger.parts_ns(), ledger.backward_ns, "ledger parts against backward_ns")
    _require(ledger.backward_ns, step.backward_ns, "ledger.backward_ns against step.backward_ns")
    phases = step.forward_ns + step.backward_ns + step.optimizer_ns + step.other_ns
    _require(phases, step.wall_ns, "phases against wall_ns")
    for column, part in (
        ("backward_self_ns", "layers_ns"),
        ("recompute_ns", "recompute_ns"),
        ("gradient_sum_ns", "gradient_sum_ns"),
        ("accumulate_ns", "accumulate_ns"),
    ):
        _require(sum(getattr(row, column) for row in run.layers), getattr(ledger, part), f"layers' {column}")
    roots = [row for row in run.layers if row.parent is None]
    owned = ledger.layers_ns + ledger.recompute_ns + ledger.gradient_sum_ns + ledger.accumulate_ns
    _require(sum(row.backward_total_ns for row in roots), owned, "the roots' backward_total_ns")
    forward = sum(row.forward_self_ns for row in run.layers)
    _require(sum(row.forward_total_ns for row in roots), forward, "the roots' forward_total_ns")
    if run.memory is not None:
        _check_memory(run.memory, run.layers)


def _check_memory(memory: MemoryInfo, layers: Sequence[LayerRow]) -> None:
    _require(sum(row.bytes for row in memory.at_peak), memory.peak_bytes, "live set at the peak", "bytes")
    _require(sum(row.bytes for row in memory.saved), memory.saved_bytes, "saved tensors against saved_bytes", "bytes")
    outside = sum(row.bytes for row in memory.saved if row.layer is None)
    own = sum(row.saved_bytes or 0 for row in layers)
    _require(own + outside, memory.saved_bytes, "layers' saved_bytes", "bytes")
    total = sum(row.saved_total_bytes or 0 for row in layers if row.parent is None)
    _require(total, own, "the roots' saved_total_bytes", "bytes")
    for name in ("held", "retained"):
        parts = sum(row.bytes for row in getattr(memory, name))
        whole = memory.held_bytes if name == "held" else memory.retained_after_step_bytes
        _require(parts, whole, f"{name} memory", "bytes")
    _require(sum(row.bytes for row in memory.copies), memory.copied_bytes, "copies", "bytes")


def _require(got: int, expected: int, what: str, unit: str = "ns") -> None:
    if got != expected:
        raise ConservationError(f"{what}: {got} != {expected} {unit}")


# --------------------------------------------------------------------------------------------------------------------
# Bulk tables: numpy columns
# --------------------------------------------------------------------------------------------------------------------


class RowKind(IntEnum):
    """What a trace row is, decided once from its name."""

    OP = 0  # an aten op, a custom Function, anything not listed below
    ADD = 1  # aten::add or aten::add_: a gradient sum where it stands directly in a NODE
    NODE = 2  # autograd::engine::evaluate_function of a node made by forward
    ACCUMULATE = 3  # autograd::engine::evaluate_function of an AccumulateGrad
    OPTIMIZER = 4  # Optimizer.step and Optimizer.zero_grad
    COMMUNICATION = 5  # a collective
    ANNOTATION = 6  # the user's own record_function: transparent
    CALL = 7  # markers of gradscope from here on
    BACKWARD = 8
    STEP = 9
    LINE = 10
    FLOP = 11
    PARAMETER = 12
    RECOMPUTE = 13
    SEEN = 14


@dataclass(frozen=True, slots=True)
class EventTable:
    """CPU events of a trace in order of (thread, start, longest first); one row an event.

    ``name`` indexes ``names``. ``parent`` is the row of the innermost enclosing event of the same thread, -1 for none;
    a parent always comes before its children.
    """

    names: tuple[str, ...]  # markers carry no number here: all calls share one name
    name: Int32Column
    kind: Int8Column  # RowKind
    argument: IntColumn  # a marker's number; -1 for other rows
    start_ns: IntColumn  # of the profiler's clock
    end_ns: IntColumn
    thread: Int32Column  # the profiler's own small thread numbers
    sequence: IntColumn  # sequence number drawn by forward, or carried by a backward node; -1 for none
    forward_thread: Int32Column  # for backward nodes, the thread whose counter drew ``sequence``; else 0
    parent: Int32Column
    depth: Int32Column  # 0 for rows without a parent
    correlation: IntColumn | None = None  # joins kernels to the op that launched them (CUDA)
    kernels: KernelTable | None = None
    shapes: tuple[str, ...] | None = None  # one text a row, only from a pass that recorded shapes
    allocations: AllocationTable | None = None  # only from a pass that recorded memory

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class AllocationTable:
    """What an allocator gave and took back, one row an event, in order of time."""

    row: Int32Column  # row of the innermost trace row around it; -1 for none
    time_ns: IntColumn
    pointer: IntColumn
    bytes: IntColumn  # negative where memory was given back
    device: tuple[str, ...]  # names of devices, "cpu" or "cuda:0"
    device_of: Int8Column  # index into ``device``
    reserved: IntColumn  # what the allocator held of the device then; 0 on the CPU

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Device activities, one row a kernel or copy, in order of start."""

    names: tuple[str, ...]
    name: IntColumn
    start_ns: IntColumn
    end_ns: IntColumn
    device: IntColumn
    stream: IntColumn
    correlation: IntColumn  # correlation of the launching op; -1 where the profiler gave none


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What is known of one module without running it."""

    path: str
    class_name: str
    parent: str | None
    parameters: int
    source: str | None
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Stretches of forward code in order of entry; row k is the span that the trace's marker number k names.

    Two uses: module calls (``label`` indexes the modules) and torch functions called from a source line (``label``
    indexes the lines). ``[low, high)`` are the sequence numbers that the span's thread drew while it ran.
    """

    label: IntColumn  # -1: something that gradscope has no name for
    low: IntColumn
    high: IntColumn  # equals the last number seen where the span never returned

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class LineInfo:
    """One source line of user code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter and the modules that hold it directly; several where it is tied."""

    name: str
    owners: tuple[int, ...]  # indices into the modules, in the order of the model


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the autograd graph as the engine is about to run it."""

    sequence: int  # -1 for AccumulateGrad
    parameter: int  # index of the parameter of an AccumulateGrad; else -1
    edges: tuple[tuple[int, int], ...]  # (node, input number) in the order of the node's outputs; -1 for no node


class Role(IntEnum):
    """What a tensor was seen to be while memory was measured."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    INPUT = 4
    OTHER = 5


@dataclass(frozen=True, slots=True)
class Sighting:
    """A storage that was seen alive at one moment."""

    mark: int  # number of the SEEN marker in the trace
    pointer: int
    bytes: int
    role: Role
    layer: int  # index of the module it belongs to; -1 for none


CHECKPOINT = "checkpoint"  # stands for a node where a checkpoint keeps what it was given


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a node of the graph held when its backward pass began."""

    mark: int  # number of the SEEN marker in the trace
    sequence: int  # of the node
    node: str  # "SoftmaxBackward0"
    what: str  # "output"
    pointer: int  # of the storage
    bytes: int  # of the storage
    shape: str
    dtype: str


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of memory that were alive at some moment of the measured step, one row each, in order of birth.

    ``born`` and ``died`` count the allocator's events of the step: a block is alive from event ``born`` up to, but not
    with, event ``died``. ``born`` is -1 for what was there before, ``died`` is ``events`` for what survived.
    """

    events: int
    bytes: IntColumn
    born: IntColumn
    died: IntColumn
    category: tuple[str, ...]  # MemoryCategory of each block
    layer: IntColumn  # -1: outside every module
    line: IntColumn  # index of the source line; -1
    op: tuple[str, ...]  # outermost op or node that allocated it; "" where it was there before
    leaf: tuple[str, ...]  # innermost op that allocated it


# --------------------------------------------------------------------------------------------------------------------
# Settings and progress of one run
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one profile run, as the command line and :func:`gradscope.profile` take them."""

    steps: int = 5
    warmup: int = 3
    device: str = "auto"
    seed: int | None = None
    lines: bool = True
    memory: bool = True
    timing: bool = True  # False: memory alone
    run_to_end: bool = False


class Progress:
    """Told where a run is; this one shows nothing. The command line has one that draws on stderr."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Enter phase ``name`` ("warm-up", "unprofiled steps", "profiled steps", ...), of ``total`` steps if known."""

    def advance(self) -> None:
        """One step of the current phase is done."""

    def done(self) -> None:
        """The run is over, also when it failed."""
