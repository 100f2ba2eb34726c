"""A run as a document: what was measured, why it is slow, and where the time and the memory are.

In short it answers "why is it slow, what do I do, what does it give" on a screen; in full it has every table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradscope import units
from gradscope.document.parts import (
    Bar,
    Bullets,
    Cell,
    Column,
    Command,
    Commands,
    Document,
    Entry,
    Fact,
    KeyValues,
    Row,
    Section,
    Style,
    Table,
    Words,
    code,
    dim,
    plain,
    strong,
)
from gradscope.document.style import heat
from gradscope.report.bucketsection import buckets_section
from gradscope.report.devicesections import device_in_short, device_section
from gradscope.report.findings import FindingRow
from gradscope.report.header import head_rows, partial_text, subject
from gradscope.report.layers import layers_section
from gradscope.report.memorysections import memory_in_short, memory_sections
from gradscope.report.nextsteps import next_steps
from gradscope.report.tree import SAVED_MEMORY, ViewOptions
from gradscope.report.view import View, build_view
from gradscope.tables import RunData

# Findings in one line each, and notes, before the rest is only counted.
_MOST_BRIEF = 6
_MOST_NOTES = 3
_SEVERITY: dict[str, Style] = {"critical": "hot", "warning": "warn"}


def profile_document(run: RunData, options: ViewOptions | None = None, path: str | Path | None = None) -> Document:
    """The document of ``run`` that the reader asked for; ``path`` is where its RUN.json lies, for the next commands.

    Raises :class:`~gradscope.tables.ConservationError` if shown and hidden layers do not add up to those of the run.
    """
    view = build_view(run, options, path)
    return Document(
        title=f"gradscope {run.gradscope}",
        subject=subject(run),
        head=KeyValues(head_rows(run, full=view.options.full)),
        sections=tuple(section for section in _sections(view, path) if section is not None),
        warning=partial_text(run),
    )


def _sections(view: View, path: str | Path | None) -> Iterator[Section | None]:
    whole = view.options.whole
    by_memory = view.tree.metric == SAVED_MEMORY
    memory = [section for section in memory_sections(view) if by_memory or whole(section.key)]
    yield _findings(view)
    yield layers_section(view)
    if by_memory:  # who sorts by memory asks about memory
        yield from memory
    yield _source_lines(view)
    nothing_else = not view.run.layers  # a trace without modules: operations are all that tells where time goes
    if whole("ops") or nothing_else:
        yield _operations(view)
    if whole("kernels") or nothing_else:
        yield _kernels(view)
    yield _ledger(view) if whole("ledger") else _ledger_in_short(view)
    yield (device_section if whole("device") else device_in_short)(view.run.device, view.run.step.wall_ns)
    if whole("buckets"):
        yield buckets_section(view.run)
    if not by_memory:
        if not any(section.key == "memory" for section in memory):
            yield memory_in_short(view)
        yield from memory
    yield _notes(view)
    steps = next_steps(view.run, view.tree, path, full=view.options.full)
    yield Section("next", "Next", "", (Commands(steps),)) if steps else None


# --------------------------------------------------------------------------------------------------------------------
# Findings
# --------------------------------------------------------------------------------------------------------------------


def _findings(view: View) -> Section | None:
    """The first finding in full and the others in a line each, or all in full; without any, what was looked for."""
    found = view.findings
    if not found.rows and not found.more and not found.nothing:
        return None
    full = view.options.whole("findings")
    shown = found.rows if full else found.rows[: 1 + _MOST_BRIEF]
    blocks: list[Entry | Words | Commands] = [Words(" ".join(found.nothing))] if found.nothing else []
    blocks += [finding_entry(number, row, full=full or number == 1) for number, row in enumerate(shown, 1)]
    left = len(found.rows) - len(shown)
    more = [words for words in (f"{left} more" if left else "", found.more.removeprefix("and ")) if words]
    if more:
        command = found.command or view.findings.all_command
        blocks.append(Commands((Command(command, f"shows {' and '.join(more)}"),)))
    about = "why it is slow and what to do; gains are estimates" if found.rows else ""
    return Section("findings", "Findings", about, tuple(blocks))


def finding_entry(number: int, row: FindingRow, *, full: bool) -> Entry:
    """Make the entry of a finding: in full, or in one line."""
    style = _SEVERITY.get(row.severity, "")
    if not full:
        brief = tuple(part for part in (row.layers, row.worth) if part)
        return Entry(number, row.severity, row.message, brief=brief, style=style)
    facts = [
        Fact("where", row.place, kind="names"),
        Fact("", row.text, kind="source"),
        Fact("why", row.evidence),
        Fact("do", row.advice),
        Fact("", row.code, kind="code"),
        Fact("gain", row.saving, "strong"),
        Fact("rule", f"{row.rule} · recipe {row.recipe}" if row.recipe else row.rule, "dim"),
    ]
    return Entry(number, row.severity, row.message, tuple(fact for fact in facts if fact.text), style=style)


# --------------------------------------------------------------------------------------------------------------------
# Time
# --------------------------------------------------------------------------------------------------------------------


def _source_lines(view: View) -> Section | None:
    group, scale = view.lines, view.scale
    if not group.rows:
        return None
    columns = (
        Column("line", "line", align="left", least=16, most=36, cut="front"),
        Column("backward_ns", "bwd", scale.unit),
        Column("share", "share"),
        *([Column("saved_bytes", "saved", drop=1)] if group.has_saved else []),
        Column("layer", "layer", align="left", drop=2, least=12, most=28, cut="front"),
        Column("text", "source", align="left", least=32),
    )

    def saved(size: int | None, style: Style = "") -> tuple[Cell, ...]:
        return (Cell(units.size(size), style),) if group.has_saved else ()

    rows = []
    for row in group.rows:
        share = view.share(row.backward_ns)
        numbers = (Cell(text, heat(share)) for text in (scale.text(row.backward_ns), units.percent(share)))
        place = code(f"{row.file}:{row.line}")
        rows.append(Row((place, *numbers, *saved(row.saved_bytes), code(row.layer or "", "dim"), code(row.text))))
    rest = (
        (f"… {group.more} more", group.more_ns, group.more_saved_bytes),
        ("no source line", group.without_ns, group.without_saved_bytes),
    )
    rows += [
        Row((*dim([label, scale.text(spent), units.percent(view.share(spent))]), *saved(size, "dim")), "rest")
        for label, spent, size in rest
        if spent or size
    ]
    about = "backward time by the line of the forward code that caused it"
    return Section("lines", "Source lines", about, (Table(columns, tuple(rows)),))


def _operations(view: View) -> Section | None:
    if not view.ops:
        return None
    scale = view.scale
    columns = (
        Column("name", "layer / operation", align="left", least=26, most=58),
        Column("self_ns", "bwd", scale.unit),
        Column("share", "share"),
        Column("calls", "calls", drop=2),
        Column("shape", "shapes", align="left", drop=1, least=16),
    )
    rows: list[Row] = []
    for group in view.ops:
        name = Cell(group.address, "strong", code=True, after=f"  {group.class_name}" if group.class_name else "")
        rows.append(Row((name, *strong([scale.text(group.ns), units.percent(view.share(group.ns))]))))
        for op in group.ops:
            numbers = plain([scale.text(op.ns), units.percent(view.share(op.ns)), units.calls(op.calls)])
            rows.append(Row((Cell(op.name, code=True, level=1), *numbers, Cell(op.shape, "dim"))))
        if group.more_ns:
            more = Cell(f"… {group.more} more", "dim", level=1)
            rows.append(Row((more, Cell(scale.text(group.more_ns), "dim")), "rest"))
    about = "what the costliest layers run in backward by themselves"
    return Section("ops", "Operations", about, (Table(columns, tuple(rows)),))


def _kernels(view: View) -> Section | None:
    if not view.kernels:
        return None
    columns = (
        Column("name", "kernel", align="left", least=24, most=72),
        Column("device_ns", "device"),
        Column("calls", "calls", drop=2),
        Column("layer", "mostly in", align="left", drop=1, least=10),
    )
    rows = []
    for kernel in view.kernels:
        numbers = plain([units.ns(kernel.device_ns), units.calls(kernel.calls)])
        layer = code(kernel.layer, "dim") if kernel.layer else Cell("outside the layers", "dim")
        rows.append(Row((code(kernel.name), *numbers, layer)))
    return Section("kernels", "Kernels", "device time, forward and backward", (Table(columns, tuple(rows)),))


def _ledger(view: View) -> Section:
    columns = (
        Column("row", "part", align="left"),
        Column("ns", "time"),
        Column("share", "share"),
        Column("bar", "", align="left", drop=2, least=10, most=20),
        Column("meaning", "", align="left", drop=1, least=45),
    )
    rows = []
    for part in view.ledger:
        share = view.share(part.ns)
        texts = plain([part.name, units.ns(part.ns), part.percent])
        rows.append(Row((*texts, Bar(share, share), Cell(part.meaning, "dim"))))
    rows.append(Row(strong(["all of backward", units.ns(view.run.step.backward_ns), "100.0 %"]), "whole"))
    return Section("ledger", "Backward breakdown", "sums to 100 %", (Table(columns, tuple(rows)),))


def _ledger_in_short(view: View) -> Section:
    parts = [f"{part.name} {units.ns(part.ns)} ({part.percent})" for part in view.ledger if part.ns]
    whole = units.ns(view.run.step.backward_ns)
    return Section("ledger", "Backward", f"{whole} = {' + '.join(parts)}" if parts else whole)


# --------------------------------------------------------------------------------------------------------------------
# Notes
# --------------------------------------------------------------------------------------------------------------------


def _notes(view: View) -> Section | None:
    notes = view.notes if view.options.full else view.notes[:_MOST_NOTES]
    if not notes:
        return None
    if left := len(view.notes) - len(notes):
        notes = (*notes, f"{left} more with --full")
    return Section("notes", "Notes", "what was not measured or is an estimate, and why", (Bullets(notes),))
