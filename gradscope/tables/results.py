"""Results: one field a key of RUN.json, and the tree that its layers must be.

Times are integer nanoseconds *per step* (mean over the measured steps), sizes are bytes. ``None`` means not measured
and is left out of the JSON; ``0`` is a measured zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gradscope.safe_text import shown_value
from gradscope.tables.memory import CategoryCourse, LayerSpan, MemoryInfo

SCHEMA_VERSION = 1

Severity = Literal["info", "warning", "critical"]
LossKind = Literal["given", "output", "mean of outputs"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How steady one quantity was over the measured steps, in ns."""

    min_ns: int
    median_ns: int
    max_ns: int
    std_ns: int  # sample standard deviation; 0 of one step


@dataclass(frozen=True, slots=True)
class TakenStep:
    """One step that was measured, whether or not it counts."""

    ns: int
    left_out: bool  # the system interrupted it, or torch.compile compiled in it


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
    waited_ns: int | None = None  # of the wall time, that the training thread had no core; None: not known
    communication_ns: int | None = None  # of the wall time, with other ranks, in any phase; None: there was none
    taken: Sequence[TakenStep] = ()  # in their order


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the backward pass is made of. The parts add up to ``backward_ns`` exactly."""

    backward_ns: int
    layers_ns: int  # backward nodes of module calls: sum of LayerRow.backward_self_ns
    recompute_ns: int  # forward run again, by checkpointing or in compiled graphs
    gradient_sum_ns: int  # adding the gradients of a value that has several users
    accumulate_ns: int  # AccumulateGrad: writing a parameter's .grad
    outside_modules_ns: int  # nodes made outside every module call (a functional loss, say)
    communication_ns: int  # collectives, what FSDP does for them, and the wait for other ranks
    engine_ns: int  # the autograd engine itself, and Python between its nodes
    unattributed_ns: int  # nodes whose forward was not seen
    hook_ns: int = 0  # the user's backward hooks, on modules and on tensors

    PARTS = (
        "layers_ns",
        "recompute_ns",
        "gradient_sum_ns",
        "accumulate_ns",
        "hook_ns",
        "outside_modules_ns",
        "communication_ns",
        "engine_ns",
        "unattributed_ns",
    )

    def parts_ns(self) -> int:
        """Sum of the parts; equal to ``backward_ns`` by construction and checked by :class:`RunData`."""
        return sum(getattr(self, name) for name in self.PARTS)


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """How long the device's kernels and copies ran in a step, each in full, by what launched them.

    The parts add up to ``kernel_ns`` exactly. What overlaps counts twice, so it may be more than the step.
    """

    kernel_ns: int
    forward_ns: int
    layers_ns: int  # from here on as in the backward pass's Ledger
    recompute_ns: int
    gradient_sum_ns: int
    accumulate_ns: int
    hook_ns: int
    outside_modules_ns: int
    communication_ns: int
    engine_ns: int
    unattributed_ns: int
    optimizer_ns: int
    other_ns: int  # launched between the phases
    elsewhere_ns: int  # launched in steps that do not count
    before_ns: int  # launched before the trace began
    unknown_ns: int  # nobody knows by what
    collectives_ns: int = 0  # of all of these, collectives between ranks
    exposed_ns: int = 0  # of the collectives, while the device did nothing else
    idle_ns: int | None = None  # of the step, in which the device did nothing; None in files of before

    PARTS = (
        "forward_ns",
        *Ledger.PARTS,
        "optimizer_ns",
        "other_ns",
        "elsewhere_ns",
        "before_ns",
        "unknown_ns",
    )

    def parts_ns(self) -> int:
        """Sum of the parts; equal to ``kernel_ns`` by construction and checked by :class:`RunData`."""
        return sum(getattr(self, name) for name in self.PARTS)

    @property
    def backward_ns(self) -> int:
        """What backward passes launched."""
        return sum(getattr(self, name) for name in Ledger.PARTS)


@dataclass(frozen=True, slots=True)
class BucketRow:
    """Gradients that DistributedDataParallel reduces in one collective; times of a mean backward pass that does.

    All ``_at_ns`` count from the beginning of the pass.
    """

    model: str  # path of the DistributedDataParallel
    number: int  # in the order in which they are sent
    parameters: int
    bytes: int
    layers: Sequence[str]  # whose gradients it holds, those with most bytes first
    first_at_ns: int  # the first of its gradients is there
    mean_at_ns: int  # they are there in the mean, weighted by their bytes
    last_at_ns: int  # the last is there
    begun_at_ns: int  # its collective begins
    begun_by: str | None  # the layer whose gradient it, or one before it, waited for; None where that is not known
    pass_ns: int  # the pass, without what it waits for behind its last node
    exposed_ns: int  # of a mean step: what is waited for it while nothing else is done
    cap_bytes: int = 0  # from which on a bucket is full
    finds_unused: bool = False  # buckets keep the order of registration


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One module of the model, by path; ``""`` is the root. Self values unless the name says total.

    The columns ``backward_self_ns``, ``recompute_ns``, ``accumulate_ns``, ``gradient_sum_ns`` and ``hook_ns`` are
    disjoint. ``backward_total_ns`` is the sum of these five over the layer and every layer below it, in the tree of
    paths.
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
    forward_self_steps_ns: Sequence[int] = ()  # forward_self_ns of each measured step
    hook_ns: int = 0  # the user's backward hooks on it, on what it made and on its parameters
    communication_ns: int = 0  # in backward, for it, with other ranks: not in backward_total_ns
    forward_communication_ns: int = 0  # of forward_self_ns
    overlapped_communication_ns: int = 0  # kernels of its collectives, while their device did something else
    estimated_ns: int | None = (
        None  # of backward_self_ns, recompute_ns and gradient_sum_ns: its share of kernels of several layers
    )
    forward_estimated_ns: int | None = None  # of forward_self_ns
    tied: Sequence[str] = ()  # parameters this layer shares with others, as "path.name"
    device_ns: int | None = None  # kernels launched under the layer, forward and backward (CUDA)
    launch_ns: int | None = None  # CPU time of the layer's backward nodes (CUDA: launches)
    idle_ns: int | None = None  # part of backward_self_ns in which the device had nothing to do (CUDA)
    flops: int | None = None  # forward + backward
    forward_flops: int | None = None
    backward_flops: int | None = None
    bytes: int | None = None  # that forward and backward must move at least; an estimate from the recorded calls
    bound_by: str | None = None  # "compute", "bandwidth", "overhead" or "waiting"
    forward_limit_ns: int | None = None  # forward_self_ns at this machine's ceilings
    backward_limit_ns: int | None = None  # backward_self_ns at this machine's ceilings
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
    phase: str  # "forward", "backward", "recompute", "gradient_sum", "accumulate", "hook", "communication", ...
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
    device_ns: int  # how long it ran; kernels that ran at the same time are each counted in full
    op: str | None = None  # name of the OpRow of this layer and phase that launched it
    busy_ns: int | None = (
        None  # its part of that row's ``self_ns``: time that several kernels share is that of the first
    )


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """What was run and how."""

    target: str
    mode: Literal["model", "script", "loop", "trace"]
    steps: int  # measured steps, those that were interrupted left out
    warmup: int
    loss: LossKind | None  # None in script and loop mode
    model: str = ""  # class name of the root, or "Generator, Discriminator"
    parameters: int = 0  # elements, each shared parameter once
    events: int = 0  # profiler events read
    batch: str | None = None  # tensors that the first call of a model in a step was given: "4x256 int64"
    steps_left_out: int = 0  # measured, and left out: the system interrupted them, or torch.compile compiled in them
    steps_compiling: int = 0  # those of them in which it compiled
    steps_asked: int = 0  # how many were to be measured; 0 where nobody asked
    optimizer_steps: Mapping[str, int] | None = None  # of a step with several optimizers: {"critic": 3, "generator": 1}


@dataclass(frozen=True, slots=True)
class Finding:
    """Why something is slow, and what to do."""

    rule: str
    severity: Severity
    layers: Sequence[str]
    line: str | None
    message: str
    evidence: str
    recipe: str | None = None
    predicted_saving_ns: int | None = None  # of one step; an estimate
    predicted_saving_bytes: int | None = None  # at the peak
    advice: str = ""  # what to do, one sentence
    code: str = ""  # the line of Python that does it
    predicted_low_ns: int | None = None  # the range of the estimate
    predicted_high_ns: int | None = None
    cost_ns: int | None = None  # measured, of one step: what the finding is about; a saving is a part of it


OWN = "(gradscope)"  # the operation that stands for what gradscope itself does in a step


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
    rules: int | None = None  # how many looked for findings; None: nobody looked
    device: DeviceLedger | None = None  # where a device's kernels were recorded
    buckets: Sequence[BucketRow] | None = None  # of DistributedDataParallel; None without one
    notes: Sequence[str] = ()  # what was not measured and why; what was estimated
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_conservation(self)

    @property
    def own_ns(self) -> int:
        """What gradscope itself took of a step: a part of what lies between the phases."""
        return sum(op.self_ns for op in self.ops if op.name == OWN and op.phase == "other")


class ConservationError(AssertionError):
    """Numbers that must add up do not: a defect of gradscope, never of the user's model."""


# Standard deviation of the step's time over its mean, from which on a time says too little to promise or to warn: the
# mean of five such steps is known to 11 %, and a part of the step to much less.
_UNRELIABLE = 0.25
# Of the step's time, spent waiting for a core: all of it may lie in one row, and look like that row's cost.
_STARVED = 0.10


def is_starved(step: StepTimes) -> bool:
    """Check that other work on the machine had so much of the cores that the times are not the program's own."""
    return step.waited_ns is not None and step.waited_ns > _STARVED * step.wall_ns


def is_unreliable(step: StepTimes) -> bool:
    """Check that the times support neither alarms nor savings: the steps differ too much, or waited for a core."""
    spread = step.spread.get("wall")
    return is_starved(step) or (spread is not None and spread.std_ns > _UNRELIABLE * step.wall_ns)


def check_conservation(run: RunData) -> None:
    """Raise :class:`ConservationError` unless every sum that RUN.json promises holds exactly.

    Checked: the ledger's parts against ``backward_ns``; the step's phases against ``wall_ns``; each layer column
    against its ledger row; the totals of the roots against their parts.
    """
    step, ledger = run.step, run.ledger
    _require(ledger.parts_ns(), ledger.backward_ns, "ledger parts against backward_ns")
    _require(ledger.backward_ns, step.backward_ns, "ledger.backward_ns against step.backward_ns")
    if run.device is not None:
        _require(run.device.parts_ns(), run.device.kernel_ns, "device's parts against kernel_ns")
    phases = step.forward_ns + step.backward_ns + step.optimizer_ns + step.other_ns
    _require(phases, step.wall_ns, "phases against wall_ns")
    for column, part in (
        ("backward_self_ns", "layers_ns"),
        ("recompute_ns", "recompute_ns"),
        ("gradient_sum_ns", "gradient_sum_ns"),
        ("accumulate_ns", "accumulate_ns"),
        ("hook_ns", "hook_ns"),
    ):
        _require(sum(getattr(row, column) for row in run.layers), getattr(ledger, part), f"layers' {column}")
    roots = [row for row in run.layers if row.parent is None]
    owned = ledger.layers_ns + ledger.recompute_ns + ledger.gradient_sum_ns + ledger.accumulate_ns + ledger.hook_ns
    _require(sum(row.backward_total_ns for row in roots), owned, "the roots' backward_total_ns")
    if sum(row.communication_ns for row in run.layers) > ledger.communication_ns:
        raise ConservationError("layers' communication_ns is more than ledger.communication_ns")
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
    if memory.categories is not None:
        _check_categories(memory, memory.categories)
    for owner in memory.owners or ():
        _require(len(owner.bytes), len(memory.timeline), f"points of {owner.owner}", "points")
    for i, point in enumerate(memory.timeline if memory.owners else ()):
        parts = sum(owner.bytes[i] for owner in memory.owners or ())
        _require(max(parts, point.bytes), point.bytes, f"owners at point {i} of the timeline", "bytes")


def _check_categories(memory: MemoryInfo, categories: Sequence[CategoryCourse]) -> None:
    """At every point of the timeline the categories add up; at the peak each is that of the live set."""
    points = memory.timeline
    for course in categories:
        _require(len(course.bytes), len(points), f"points of {course.category}", "points")
    for i, point in enumerate(points):
        parts = sum(course.bytes[i] for course in categories)
        _require(parts, point.bytes, f"categories at point {i} of the timeline", "bytes")
    held = Counter[str]()
    for row in memory.at_peak:
        held[row.category] += row.bytes
    at_peak = [i for i, point in enumerate(points) if (point.ns, point.bytes) == (memory.peak_ns, memory.peak_bytes)]
    if not at_peak:
        return
    # Several points may be of the same time and size; one of them is the peak.
    found = [{course.category: course.bytes[i] for course in categories if course.bytes[i]} for i in at_peak]
    if dict(held) not in found:
        raise ConservationError(f"categories at the peak: {found[0]} != {dict(held)} bytes")


def _require(got: int, expected: int, what: str, unit: str = "ns") -> None:
    if got != expected:
        raise ConservationError(f"{what}: {got} != {expected} {unit}")


# Python itself calls no deeper model: a module's call takes three of its thousand frames.
MOST_LEVELS = 1_000


class ShapeError(ValueError):
    """The layers are no tree; the message says which of them, and why."""


def check_tree(rows: Sequence[LayerRow]) -> None:
    """Raise :class:`ShapeError` unless paths differ, no layer is inside itself, and none is too deep.

    A parent that has no row is skipped: the nearest one on its path that has a row counts.
    """
    known = {row.path: number for number, row in enumerate(rows)}
    if len(known) < len(rows):
        number, row = next((i, row) for i, row in enumerate(rows) if known[row.path] != i)
        raise ShapeError(f"layers[{known[row.path]}].path is {shown_value(row.path)}, as that of layers[{number}]")
    levels: dict[str, int] = {}
    for number, row in enumerate(rows):
        _level(number, row, rows, known, levels)


def check_spans(spans: Sequence[LayerSpan]) -> None:
    """Raise :class:`ShapeError` unless the spans are in order of time, and none overlaps another."""
    last_ns = 0
    for number, span in enumerate(spans):
        if not last_ns <= span.start_ns <= span.end_ns:
            raise ShapeError(
                f"memory.spans[{number}] is from {span.start_ns} to {span.end_ns} ns, and the one before ends at "
                f"{last_ns}"
            )
        last_ns = span.end_ns


def _level(
    number: int, row: LayerRow, rows: Sequence[LayerRow], known: Mapping[str, int], levels: dict[str, int]
) -> None:
    """Note how deep ``row`` lies, and all above it."""
    chain: list[LayerRow] = []
    seen: set[str] = set()
    at: LayerRow | None = row
    while at is not None and at.path not in levels:
        if at.path in seen:
            raise ShapeError(
                f"layers[{number}].parent is {shown_value(row.parent)}, which makes a layer its own parent"
            )
        seen.add(at.path)
        chain.append(at)
        above = parent_path(at, known)
        at = None if above is None else rows[known[above]]
    level = 0 if at is None else levels[at.path] + 1
    for one in reversed(chain):
        levels[one.path] = level
        level += 1
    if levels[row.path] >= MOST_LEVELS:
        raise ShapeError(f"layers[{number}] is more than {MOST_LEVELS} levels deep")


def parent_path(row: LayerRow, known: Mapping[str, object]) -> str | None:
    """The path of the nearest layer above ``row`` that is in ``known``; None for a root."""
    path = row.parent
    while path is not None and path not in known:
        path = path.rpartition(".")[0] if path else None
    return None if path == row.path and row.parent != row.path else path
