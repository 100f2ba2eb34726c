"""A comparison as a document: totals, what changed in time and in memory, and layers that only one run has."""

from __future__ import annotations

from collections.abc import Sequence

from gradscope import __version__, units
from gradscope.compare import messages
from gradscope.compare.changes import Change, Comparison, Presence
from gradscope.compare.layertable import changed_layers, is_changed, layer_cell, style_of
from gradscope.compare.measured import RunSpread
from gradscope.compare.memorytable import changed_memory
from gradscope.compare.options import DiffOptions
from gradscope.document.parts import Bullets, Cell, Column, Document, KeyValues, Row, Section, Table, code, dim, plain
from gradscope.tables import Ledger, RunData

WARNING = "WARNING: the runs differ in more than the code, and what follows may come from that:"


def diff_document(comparison: Comparison, options: DiffOptions | None = None) -> Document:
    """The document of ``comparison`` that the reader asked for."""
    options = options or DiffOptions()
    time, memory = changed_layers(comparison, options), changed_memory(comparison, options)
    sections = [
        _totals(comparison),
        *((memory, time) if options.sort == "memory" else (time, memory)),
        _presence("new", "New layers", "only in the run after", comparison.new, comparison.after, options),
        _presence(
            "removed", "Removed layers", "only in the run before", comparison.removed, comparison.before, options
        ),
    ]
    if comparison.notes:
        notes = Bullets(tuple(comparison.notes))
        sections.append(Section("notes", "Notes", "what could not be compared, and why", (notes,)))
    reasons = tuple(mismatch.text for mismatch in comparison.mismatches)
    return Document(
        title=f"gradscope {__version__}",
        subject="comparison",
        head=KeyValues(_header(comparison)),
        sections=tuple(section for section in sections if section is not None),
        warning=WARNING if reasons else "",
        reasons=reasons,
    )


def _header(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    backward = next(change for change in comparison.totals if change.metric == "backward_ns")
    return (
        ("before", _run(comparison.before, comparison.names[0])),
        ("after", _run(comparison.after, comparison.names[1])),
        ("backward", _sentence(backward)),
        ("layers", _counts(comparison)),
    )


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


def _totals(comparison: Comparison) -> Section | None:
    columns = (
        Column("metric", "", align="left"),
        Column("before", "before"),
        Column("after", "after"),
        Column("difference", "change"),
        Column("ratio", "%"),
        Column("noise", "noise", drop=1),
        Column("verdict", "", align="left"),
    )
    rows = []
    order = list(messages.TOTAL_WORDS)
    for change in sorted(comparison.totals, key=lambda one: order.index(one.metric)):
        part = change.metric in Ledger.PARTS
        style = style_of(change.difference or 0) if change.real else "dim"
        name = Cell(messages.TOTAL_WORDS[change.metric], "dim" if part else "strong", level=int(part))
        amounts = plain([messages.value(amount, change.unit) for amount in (change.before, change.after)])
        difference = messages.mark(change) + messages.signed(change.difference, change.unit)
        changed = Cell(difference, style), Cell(messages.relative(change), style)
        last = Cell(messages.noise(change), "dim"), Cell(messages.verdict(change), style)
        rows.append(Row((name, *amounts, *changed, *last)))
    if not rows:
        return None
    about = "the mean step, and the one that measured memory"
    return Section("totals", "Totals", about, (Table(columns, tuple(rows)),))


def _presence(
    key: str, title: str, about: str, found: Sequence[Presence], run: RunData, options: DiffOptions
) -> Section | None:
    if not found:
        return None
    step = run.step
    scale = units.time_scale(max(step.backward_ns, step.forward_ns))
    columns = (
        Column("path", "layer", align="left", least=24, most=56, cut="front"),
        Column("class", "class", align="left", drop=3, least=9, most=22),
        Column("backward_ns", "bwd", scale.unit),
        Column("forward_ns", "fwd", scale.unit),
        Column("saved_bytes", "saved", drop=1),
        Column("layers", "layers", drop=2),
    )

    def numbers(some: Sequence[Presence]) -> list[str]:
        saved = [one.saved_bytes for one in some if one.saved_bytes is not None]
        times = [sum(one.backward_ns for one in some), sum(one.forward_ns for one in some)]
        sizes = [units.size(sum(saved) if saved else None), units.count(sum(one.layers for one in some))]
        return [*map(scale.text, times), *sizes]

    rows = [
        Row((layer_cell(one.address, len(one.paths)), code(one.class_name, "dim"), *plain(numbers([one]))))
        for one in found[: options.top]
    ]
    if more := found[options.top :]:
        rows.append(Row(dim([f"… {len(more)} more", "", *numbers(more)]), "rest"))
    return Section(key, title, f"{about}, each with all below it", (Table(columns, tuple(rows)),))
