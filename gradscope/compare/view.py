"""A comparison ready to be written down: words and tables of text, of which the terminal and Markdown show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradscope import __version__, units
from gradscope.compare import messages
from gradscope.compare.changes import Change, Comparison, Presence
from gradscope.compare.layertable import changed_layers, is_changed, style_of
from gradscope.compare.measured import RunSpread
from gradscope.compare.memorytable import changed_memory
from gradscope.compare.options import DiffOptions
from gradscope.compare.table import AlignedTable, Field, Row, repeated
from gradscope.tables import Ledger, RunData

WARNING = "WARNING: the runs differ in more than the code, and what follows may come from that:"


@dataclass(frozen=True, slots=True)
class DiffView:
    """A whole comparison in the order of reading."""

    title: str
    warnings: tuple[str, ...]
    header: tuple[tuple[str, str], ...]  # (name, text)
    tables: tuple[AlignedTable, ...]
    notes: tuple[str, ...]


def build_view(comparison: Comparison, options: DiffOptions | None = None) -> DiffView:
    """The view of ``comparison`` that the reader asked for."""
    options = options or DiffOptions()
    time = [changed_layers(comparison, options)]
    memory = [changed_memory(comparison, options)]
    middle = [*memory, *time] if options.sort == "memory" else [*time, *memory]
    tables = [
        _totals(comparison),
        *middle,
        _presence("New layers", "only in the run after", comparison.new, comparison.after, options),
        _presence("Removed layers", "only in the run before", comparison.removed, comparison.before, options),
    ]
    return DiffView(
        title=f"gradscope {__version__}  comparison",
        warnings=tuple(mismatch.text for mismatch in comparison.mismatches),
        header=_header(comparison),
        tables=tuple(table for table in tables if table.rows),
        notes=tuple(comparison.notes),
    )


def _header(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    backward = next(change for change in comparison.totals if change.metric == "backward_ns")
    rows = [
        ("before", _run(comparison.before, comparison.names[0])),
        ("after", _run(comparison.after, comparison.names[1])),
        ("backward", _sentence(backward)),
        ("layers", _counts(comparison)),
    ]
    return tuple(rows)


def _run(run: RunData, name: str) -> str:
    steps = run.workload.steps
    named = [] if name in ("before", "after") else [name]  # it is no file
    parts = [*named, run.workload.target, f"{steps} {'step' if steps == 1 else 'steps'}"]
    if steps > 1 and "wall" in run.step.spread:
        parts[-1] += f" of {units.ns(run.step.wall_ns)} ±{units.percent(RunSpread(run).relative('wall'))}"
    return " · ".join(parts)


def _sentence(change: Change) -> str:
    text = f"{messages.value(change.before, change.unit)} → {messages.value(change.after, change.unit)}"
    text += f", {messages.relative(change)}"
    if not change.difference:
        return f"{text}: the same"
    if change.real:
        return f"{text}: {messages.verdict(change)}, beyond the noise of {messages.noise(change)}"
    if change.real is None:
        return f"{text}: one step does not say whether that is noise"
    return f"{text}: within the noise of {messages.noise(change)}"


def _counts(comparison: Comparison) -> str:
    matched = [layer for layer in comparison.layers if layer.status == "matched"]
    time = {path for group in comparison.groups if is_changed(group) for path in group.paths}
    memory = {path for group in comparison.memory for path in group.paths}
    new, removed = (sum(one.layers for one in side) for side in (comparison.new, comparison.removed))
    parts = [f"{len(time)} changed in time", f"{len(memory)} in memory", f"{new} new", f"{removed} removed"]
    return " · ".join([*parts, f"{len(matched) - len(time | memory)} the same but for noise"])


def _totals(comparison: Comparison) -> AlignedTable:
    fields = (
        Field("", "left"),
        Field("before"),
        Field("after"),
        Field("change"),
        Field("%"),
        Field("noise", drop=1),
        Field("", "left"),
    )
    rows = []
    order = {name: number for number, name in enumerate(_ORDER)}
    for change in sorted(comparison.totals, key=lambda one: order.get(one.metric, len(order))):
        part = change.metric in Ledger.PARTS
        style = _style(change)
        rows.append(
            Row(
                (("  " if part else "") + messages.TOTAL_WORDS[change.metric], "dim" if part else "strong"),
                (messages.value(change.before, change.unit), ""),
                (messages.value(change.after, change.unit), ""),
                (messages.mark(change) + messages.signed(change.difference, change.unit), style),
                (messages.relative(change), style),
                (messages.noise(change), "dim"),
                (messages.verdict(change), style),
            )
        )
    return AlignedTable("Totals", "the mean step, and the one that measured memory", fields, tuple(rows))


_ORDER = ("wall_ns", "forward_ns", "backward_ns", *Ledger.PARTS, "optimizer_ns", "other_ns")


def _style(change: Change) -> str:
    if not change.real:
        return "dim"
    return style_of(change.difference or 0)


def _presence(title: str, about: str, found: Sequence[Presence], run: RunData, options: DiffOptions) -> AlignedTable:
    step = run.step
    scale = units.time_scale(max(step.backward_ns, step.forward_ns))
    fields = (
        Field("layer", "left", least=24, most=56, cut="front"),
        Field("class", "left", drop=3, least=9, most=22),
        Field(f"bwd {scale.unit}"),
        Field(f"fwd {scale.unit}"),
        Field("saved", drop=1),
        Field("layers", drop=2),
    )
    rows = [
        Row(
            (repeated(one.address, len(one.paths)), ""),
            (one.class_name, "dim"),
            (scale.text(one.backward_ns), ""),
            (scale.text(one.forward_ns), ""),
            (units.size(one.saved_bytes), ""),
            (units.count(one.layers), ""),
        )
        for one in found[: options.top]
    ]
    more = found[options.top :]
    if more:
        saved = [one.saved_bytes for one in more if one.saved_bytes is not None]
        rows.append(
            Row(
                (f"… {len(more)} more", "dim"),
                ("", ""),
                (scale.text(sum(one.backward_ns for one in more)), "dim"),
                (scale.text(sum(one.forward_ns for one in more)), "dim"),
                (units.size(sum(saved) if saved else None), "dim"),
                (units.count(sum(one.layers for one in more)), "dim"),
            )
        )
    return AlignedTable(title, f"{about}, each with all below it", fields, tuple(rows))
