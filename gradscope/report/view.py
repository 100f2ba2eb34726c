"""What a report shows of a run, chosen and summed: exact numbers, before they are texts of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradscope import units
from gradscope.report.findings import FindingsView, build_findings
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.layer_cost import Amounts, add_up
from gradscope.report.memory import MemoryView, build_memory
from gradscope.report.tree import Sort, Tree, TreeRow, ViewOptions, select
from gradscope.tables import ConservationError, Ledger, OpRow, RunData, is_unreliable

__all__ = ["LedgerLine", "LineGroup", "OpGroup", "Sort", "TreeRow", "View", "ViewOptions", "build_view"]

# The layers whose operations are listed, and how many of each.
OP_LAYERS = 3
OPS_PER_LAYER = 4
TOP_KERNELS = 5

# Name and meaning of each part, the meaning of at most 45 characters, so that it fits beside the numbers in 80 columns.
LEDGER_WORDS: Mapping[str, tuple[str, str]] = {
    "layers_ns": ("layers", "the layers' own backward nodes"),
    "recompute_ns": ("recompute", "forward run again by activation checkpointing"),
    "gradient_sum_ns": ("fan-out sums", "gradient accumulation at fan-out"),
    "accumulate_ns": ("accumulate", "AccumulateGrad: writing the parameters' .grad"),
    "hook_ns": ("backward hooks", "your hooks on modules, tensors and parameters"),
    "outside_modules_ns": ("outside modules", "nodes of no module: a functional loss, say"),
    "communication_ns": ("communication", "collectives of DDP and FSDP"),
    "engine_ns": ("autograd overhead", "the engine, and Python between nodes"),
    "unattributed_ns": ("unattributed", "nodes whose forward was not seen"),
}

# Phases of operations that are part of a layer's backward, and those with a row of their own in the ledger.
LAYER_PHASES = frozenset(("backward", "recompute", "gradient_sum", "accumulate", "hook"))
_OTHER_PHASES = frozenset(("communication", "unattributed"))


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One part of the backward pass."""

    name: str
    ns: int
    percent: str  # the percents of all lines add up to 100.0
    share: float
    meaning: str


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One source line and the backward time it caused."""

    place: str  # "examples/gpt.py:58"
    backward_ns: int
    forward_ns: int
    share: float
    layer: str  # address of the layer that spent most there; "" outside every module
    text: str
    saved_bytes: int | None


@dataclass(frozen=True, slots=True)
class LineGroup:
    """The costliest source lines, and what they leave out."""

    rows: tuple[SourceLine, ...]
    more: int  # lines not shown
    more_ns: int
    more_share: float
    without_ns: int  # backward time that has no source line
    without_share: float
    has_saved: bool  # it is known what each line saves for backward
    more_saved_bytes: int
    without_saved_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer, repeats summed."""

    name: str  # with the phase where it is not the layer's own backward: "aten::addmm (recompute)"
    calls: float
    ns: int
    share: float
    shape: str


@dataclass(frozen=True, slots=True)
class OpGroup:
    """What one of the costliest layers runs in backward."""

    address: str
    class_name: str
    ns: int
    share: float
    ops: tuple[Op, ...]
    more: int  # operations not shown
    more_ns: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One device kernel, summed over layers."""

    name: str
    calls: float
    device_ns: int
    layer: str  # where it ran longest


@dataclass(frozen=True, slots=True)
class View:
    """What is shown of a run."""

    run: RunData
    options: ViewOptions
    scale: units.TimeScale  # of every column of times, so that tables can be compared
    tree: Tree
    lines: LineGroup
    ops: tuple[OpGroup, ...]
    kernels: tuple[Kernel, ...]
    ledger: tuple[LedgerLine, ...]
    memory: MemoryView | None  # None: not measured
    findings: FindingsView
    notes: tuple[str, ...]


def build_view(run: RunData, options: ViewOptions | None = None, path: str | Path | None = None) -> View:
    """Choose what the reader asked for; ``path`` is where the RUN.json lies, for the commands that show more.

    Raises :class:`ConservationError` if shown and hidden layers do not add up to the layers of the run.
    """
    options = options or ViewOptions()
    notes = tuple(run.notes)
    if options.sort == "memory" and all(row.saved_bytes is None for row in run.layers):
        options = replace(options, sort="backward")
        notes = (*notes, "memory was not measured: the layers are sorted by backward instead")
    step, memory = run.step, run.memory
    roots = build_tree(run.layers, step.backward_ns, run.workload.model, steady=not is_unreliable(step))
    tree = select(roots, options, step.backward_ns, step.forward_ns, None if memory is None else memory.saved_bytes)
    _check(tree, run)
    addresses = {path: node for root in roots for node in root.walk() for path in node.paths}
    return View(
        run=run,
        options=options,
        scale=units.time_scale(max(step.backward_ns, step.forward_ns)),
        tree=tree,
        lines=_lines(run, options, addresses),
        ops=_op_groups(run, roots, addresses),
        kernels=_kernels(run, addresses),
        ledger=_ledger(run.ledger),
        memory=None
        if memory is None
        else build_memory(memory, options, lambda layer: _address(layer, addresses, run), run.workload.model),
        findings=build_findings(run, addresses, options, path),
        notes=notes,
    )


def _check(tree: Tree, run: RunData) -> None:
    shown = add_up([*(row.node.own for row in tree.rows), *(hidden.own for hidden in tree.hidden), Amounts()])
    ledger = run.ledger
    owned = (ledger.layers_ns, ledger.recompute_ns, ledger.accumulate_ns, ledger.gradient_sum_ns, ledger.hook_ns)
    expected = sum(owned)
    if shown.backward_ns != expected:
        raise ConservationError(f"shown and hidden layers: {shown.backward_ns} != {expected} ns of backward")
    forward = sum(row.forward_self_ns for row in run.layers)
    if shown.forward_ns != forward:
        raise ConservationError(f"shown and hidden layers: {shown.forward_ns} != {forward} ns of forward")
    saved = sum(row.saved_bytes or 0 for row in run.layers)
    if (shown.saved_bytes or 0) != saved:
        raise ConservationError(f"shown and hidden layers: {shown.saved_bytes} != {saved} bytes saved for backward")


# --------------------------------------------------------------------------------------------------------------------
# Ledger, lines, operations
# --------------------------------------------------------------------------------------------------------------------


def _ledger(ledger: Ledger) -> tuple[LedgerLine, ...]:
    """Parts that are not zero, costliest first; what could not be attributed is always said, and last."""
    values = {name: int(getattr(ledger, name)) for name in Ledger.PARTS}
    kept = [name for name in Ledger.PARTS if values[name] and name != "unattributed_ns"]
    kept.sort(key=lambda name: -values[name])
    kept.append("unattributed_ns")
    whole = ledger.backward_ns
    percents = units.percents_of([values[name] for name in kept], whole)
    lines = []
    for name, percent in zip(kept, percents, strict=True):
        title, meaning = LEDGER_WORDS[name]
        lines.append(LedgerLine(title, values[name], percent, _share(values[name], whole), meaning))
    return tuple(lines)


def _lines(run: RunData, options: ViewOptions, addresses: Mapping[str, FoldedNode]) -> LineGroup:
    whole = run.step.backward_ns
    spending = sorted((line for line in run.lines if line.backward_ns > 0), key=lambda line: -line.backward_ns)
    shown, more = spending[: options.most_lines], spending[options.most_lines :]
    more_ns = sum(line.backward_ns for line in more)
    # Lines can cover a little more than the whole where they were matched by another pass: never print a negative.
    without = max(whole - sum(line.backward_ns for line in spending), 0)
    rows = tuple(
        SourceLine(
            place=f"{line.file}:{line.line}",
            backward_ns=line.backward_ns,
            forward_ns=line.forward_ns,
            share=_share(line.backward_ns, whole),
            layer=_address(line.layer, addresses, run),
            text=line.text,
            saved_bytes=line.saved_bytes,
        )
        for line in shown
    )
    # Lines without backward time may save as well: they are among those not shown.
    idle = sum(1 for line in run.lines if line.backward_ns <= 0 and line.saved_bytes)
    saved = sum(line.saved_bytes or 0 for line in run.lines)
    return LineGroup(
        rows=rows,
        more=len(more) + idle,
        more_ns=more_ns,
        more_share=_share(more_ns, whole),
        without_ns=without,
        without_share=_share(without, whole),
        has_saved=any(line.saved_bytes is not None for line in run.lines),
        more_saved_bytes=saved - sum(row.saved_bytes or 0 for row in rows),
        without_saved_bytes=max(run.memory.saved_bytes - saved, 0) if run.memory is not None else 0,
    )


def _op_groups(run: RunData, roots: Sequence[FoldedNode], addresses: Mapping[str, FoldedNode]) -> tuple[OpGroup, ...]:
    """The operations of the nodes that cost most by themselves, and of what is outside every module."""
    by_owner: dict[int | None, list[OpRow]] = {}
    for op in run.ops:
        if op.phase in _OTHER_PHASES or (op.layer is None and op.phase in LAYER_PHASES):
            by_owner.setdefault(None, []).append(op)
        elif op.layer is not None and op.layer in addresses and op.phase in LAYER_PHASES:
            by_owner.setdefault(id(addresses[op.layer]), []).append(op)
    named: dict[int | None, tuple[str, str, int]] = {
        id(node): (_name(node, run), node.class_name, node.own.backward_ns) for root in roots for node in root.walk()
    }
    named[None] = ("outside the layers", "", sum(op.self_ns for op in by_owner.get(None, ())))
    costliest = sorted((owner for owner in by_owner if named[owner][2] > 0), key=lambda owner: -named[owner][2])
    return tuple(_op_group(by_owner[owner], *named[owner], run.step.backward_ns) for owner in costliest[:OP_LAYERS])


def _op_group(rows: Sequence[OpRow], address: str, class_name: str, own_ns: int, whole: int) -> OpGroup:
    merged: dict[str, list[OpRow]] = {}
    for row in rows:
        name = row.name if row.phase == "backward" else f"{row.name} ({row.phase.replace('_', ' ')})"
        merged.setdefault(name, []).append(row)
    ops = [
        Op(
            name=name,
            calls=sum(row.calls for row in same),
            ns=(spent := sum(row.self_ns for row in same)),
            share=_share(spent, whole),
            shape=max(same, key=lambda row: row.self_ns).shape or "",
        )
        for name, same in merged.items()
    ]
    ops.sort(key=lambda op: -op.ns)
    more = ops[OPS_PER_LAYER:]
    shown = tuple(ops[:OPS_PER_LAYER])
    return OpGroup(address, class_name, own_ns, _share(own_ns, whole), shown, len(more), sum(op.ns for op in more))


def _kernels(run: RunData, addresses: Mapping[str, FoldedNode]) -> tuple[Kernel, ...]:
    by_name: dict[str, dict[str, tuple[float, int]]] = {}
    for row in run.kernels:
        layers = by_name.setdefault(row.name, {})
        where = _address(row.layer, addresses, run)
        calls, spent = layers.get(where, (0.0, 0))
        layers[where] = (calls + row.calls, spent + row.device_ns)
    kernels = [
        Kernel(
            name,
            sum(calls for calls, _ in layers.values()),
            sum(spent for _, spent in layers.values()),
            max(layers, key=lambda where: layers[where][1]),
        )
        for name, layers in by_name.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.device_ns)[:TOP_KERNELS])


def _address(layer: str | None, addresses: Mapping[str, FoldedNode], run: RunData) -> str:
    if layer is None:
        return ""
    node = addresses.get(layer)
    return _name(node, run) if node else layer


def _name(node: FoldedNode, run: RunData) -> str:
    return node.address or node.label or run.workload.model


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
