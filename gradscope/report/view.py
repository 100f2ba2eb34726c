"""What a report shows of a run, chosen and summed: exact numbers, before they are texts of a document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradscope import units
from gradscope.report.findings import FindingsView, build_findings
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.layer_cost import Amounts, add_up
from gradscope.report.memory import MemoryView, build_memory
from gradscope.report.tree import Sort, Tree, TreeRow, ViewOptions, select
from gradscope.tables import ConservationError, Ledger, LineRow, OpRow, RunData, is_unreliable

__all__ = ["LedgerLine", "LineGroup", "OpGroup", "Sort", "TreeRow", "View", "ViewOptions", "build_view"]

# The layers whose operations are listed, and how many of each.
OP_LAYERS = 3
OPS_PER_LAYER = 4
TOP_KERNELS = 5

# Name and meaning of each part, the meaning of at most 45 characters, so that it fits beside the numbers in 80 columns.
LEDGER_WORDS: Mapping[str, tuple[str, str]] = {
    "layers_ns": ("layers", "the layers' own backward nodes"),
    "recompute_ns": ("recompute", "forward run again, by checkpointing or in compiled graphs"),
    "gradient_sum_ns": ("fan-out sums", "gradient accumulation at fan-out"),
    "accumulate_ns": ("accumulate", "AccumulateGrad: writing the parameters' .grad"),
    "hook_ns": ("backward hooks", "your hooks on modules, tensors and parameters"),
    "outside_modules_ns": ("outside modules", "nodes of no module: a functional loss, say"),
    "communication_ns": ("communication", "collectives, FSDP's work for them, waits for other ranks"),
    "engine_ns": ("autograd overhead", "the engine, and Python between nodes"),
    "unattributed_ns": ("unattributed", "nodes whose forward was not seen"),
}

# Phases of operations that are part of a layer's backward.
LAYER_PHASES = frozenset(("backward", "recompute", "gradient_sum", "accumulate", "hook"))
# Parts of the ledger that belong to no layer, and the phase that their operations are listed under.
OUTSIDE_PHASES: Mapping[str, str] = {
    "outside_modules_ns": "backward",
    "communication_ns": "communication",
    "engine_ns": "engine",
    "unattributed_ns": "unattributed",
}
_OTHER_PHASES = frozenset(("communication", "unattributed"))


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One part of the backward pass."""

    name: str
    ns: int
    percent: str  # the percents of all lines add up to 100.0
    meaning: str


@dataclass(frozen=True, slots=True)
class LineGroup:
    """The costliest source lines, and what they leave out."""

    rows: tuple[LineRow, ...]  # in the layer that spent most there, by the address it is shown under
    more: int  # lines not shown
    more_ns: int
    without_ns: int  # backward time that has no source line
    has_saved: bool  # it is known what each line saves for backward
    more_saved_bytes: int
    without_saved_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer, repeats summed."""

    name: str  # with the phase where it is not the layer's own backward: "aten::addmm (recompute)"
    calls: float
    ns: int
    shape: str


@dataclass(frozen=True, slots=True)
class OpGroup:
    """What one of the costliest layers runs in backward."""

    address: str
    class_name: str
    ns: int
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

    def share(self, ns: int) -> float:
        """The part of the backward pass that this is, 0..1."""
        whole = self.run.step.backward_ns
        return ns / whole if whole else 0.0


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
        ops=_op_groups(run, addresses),
        kernels=_kernels(run, addresses),
        ledger=_ledger(run.ledger),
        memory=None if memory is None else build_memory(memory, options, lambda layer: _address(layer, addresses, run)),
        findings=build_findings(run, addresses, options, path),
        notes=notes,
    )


def _check(tree: Tree, run: RunData) -> None:
    shown = add_up([*(row.node.own for row in tree.rows), *(hidden.own for hidden in tree.hidden), Amounts()])
    ledger = run.ledger
    owned = (ledger.layers_ns, ledger.recompute_ns, ledger.accumulate_ns, ledger.gradient_sum_ns, ledger.hook_ns)
    for amount, expected, what in (
        (shown.backward_ns, sum(owned), "ns of backward"),
        (shown.forward_ns, sum(row.forward_self_ns for row in run.layers), "ns of forward"),
        (shown.saved_bytes, sum(row.saved_bytes or 0 for row in run.layers), "bytes saved for backward"),
    ):
        if (amount or 0) != expected:
            raise ConservationError(f"shown and hidden layers: {amount} != {expected} {what}")


# --------------------------------------------------------------------------------------------------------------------
# Ledger, lines, operations
# --------------------------------------------------------------------------------------------------------------------


def _ledger(ledger: Ledger) -> tuple[LedgerLine, ...]:
    """Parts that are not zero, costliest first; what could not be attributed is always said, and last."""
    values = {name: int(getattr(ledger, name)) for name in Ledger.PARTS}
    kept = [name for name in Ledger.PARTS if values[name] and name != "unattributed_ns"]
    kept.sort(key=lambda name: -values[name])
    kept.append("unattributed_ns")
    percents = units.percents_of([values[name] for name in kept], ledger.backward_ns)
    return tuple(
        LedgerLine(LEDGER_WORDS[name][0], values[name], percent, LEDGER_WORDS[name][1])
        for name, percent in zip(kept, percents, strict=True)
    )


def _lines(run: RunData, options: ViewOptions, addresses: Mapping[str, FoldedNode]) -> LineGroup:
    spending = sorted((line for line in run.lines if line.backward_ns > 0), key=lambda line: -line.backward_ns)
    shown, more = spending[: options.most_lines], spending[options.most_lines :]
    # Lines without backward time may save as well: they are among those not shown.
    idle = sum(1 for line in run.lines if line.backward_ns <= 0 and line.saved_bytes)
    saved = sum(line.saved_bytes or 0 for line in run.lines)
    return LineGroup(
        rows=tuple(replace(line, layer=_address(line.layer, addresses, run)) for line in shown),
        more=len(more) + idle,
        more_ns=sum(line.backward_ns for line in more),
        # Lines can cover a little more than the whole where they were matched by another pass: never print a negative.
        without_ns=max(run.step.backward_ns - sum(line.backward_ns for line in spending), 0),
        has_saved=any(line.saved_bytes is not None for line in run.lines),
        more_saved_bytes=saved - sum(line.saved_bytes or 0 for line in shown),
        without_saved_bytes=max(run.memory.saved_bytes - saved, 0) if run.memory is not None else 0,
    )


def _op_groups(run: RunData, addresses: Mapping[str, FoldedNode]) -> tuple[OpGroup, ...]:
    """The operations of the nodes that cost most by themselves, and of what is outside every module."""
    by_owner: dict[int | None, list[OpRow]] = {}
    for op in run.ops:
        if op.phase in _OTHER_PHASES or (op.layer is None and op.phase in LAYER_PHASES):
            by_owner.setdefault(None, []).append(op)
        elif op.layer is not None and op.layer in addresses and op.phase in LAYER_PHASES:
            by_owner.setdefault(id(addresses[op.layer]), []).append(op)
    named: dict[int | None, tuple[str, str, int]] = {
        id(node): (_name(node, run), node.class_name, node.own.backward_ns) for node in addresses.values()
    }
    named[None] = ("outside the layers", "", sum(op.self_ns for op in by_owner.get(None, ())))
    costliest = sorted((owner for owner in by_owner if named[owner][2] > 0), key=lambda owner: -named[owner][2])
    return tuple(_op_group(by_owner[owner], *named[owner]) for owner in costliest[:OP_LAYERS])


def _op_group(rows: Sequence[OpRow], address: str, class_name: str, own_ns: int) -> OpGroup:
    merged: defaultdict[str, list[OpRow]] = defaultdict(list)
    for row in rows:
        merged[row.name if row.phase == "backward" else f"{row.name} ({row.phase.replace('_', ' ')})"].append(row)
    ops = [
        Op(
            name=name,
            calls=sum(row.calls for row in same),
            ns=sum(row.self_ns for row in same),
            shape=max(same, key=lambda row: row.self_ns).shape or "",
        )
        for name, same in merged.items()
    ]
    ops.sort(key=lambda op: -op.ns)
    more = ops[OPS_PER_LAYER:]
    return OpGroup(address, class_name, own_ns, tuple(ops[:OPS_PER_LAYER]), len(more), sum(op.ns for op in more))


def _kernels(run: RunData, addresses: Mapping[str, FoldedNode]) -> tuple[Kernel, ...]:
    calls: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    spent: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in run.kernels:
        where = _address(row.layer, addresses, run)
        calls[row.name][where] += row.calls
        spent[row.name][where] += row.device_ns
    kernels = [
        Kernel(name, sum(calls[name].values()), layers.total(), max(layers, key=layers.__getitem__))
        for name, layers in spent.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.device_ns)[:TOP_KERNELS])


def _address(layer: str | None, addresses: Mapping[str, FoldedNode], run: RunData) -> str:
    if layer is None:
        return ""
    node = addresses.get(layer)
    return _name(node, run) if node else layer


def _name(node: FoldedNode, run: RunData) -> str:
    return node.place or run.workload.model
