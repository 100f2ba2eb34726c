"""Memory: who holds the peak, its course over the step, what is saved for backward, copies, and what stays alive."""

from __future__ import annotations

from gradscope import units
from gradscope.document.parts import (
    Bar,
    Cell,
    Column,
    KeyValues,
    Row,
    Section,
    Table,
    Words,
    code,
    dim,
    strong,
)
from gradscope.document.style import heat
from gradscope.report.memory import OUTSIDE, Copy, Holder, KeptTensors, Largest, MemoryView
from gradscope.report.memorywords import allocator_words, outside_words, peak_words
from gradscope.report.view import View
from gradscope.tables import MemoryInfo

NO_LINE = "no source line"
# Owners and tensors that are named in short.
_OWNERS, _TENSORS = 2, 2


def memory_in_short(view: View) -> Section | None:
    """Who holds the peak and what is saved for backward, in a line each, and a leak; None where it was not measured."""
    memory = view.memory
    if memory is None or not memory.holders.whole:
        return None
    owners = [
        f"{units.size(row.bytes)} {row.category} {'' if row.owner == OUTSIDE else 'of '}{row.owner}"
        for row in memory.holders.rows[:_OWNERS]
    ]
    tensors = [
        f"{units.size(row.bytes)} {row.what}" + (f" ({row.line})" if row.line else "")
        for row in memory.saved.rows[:_TENSORS]
    ]
    texts = [(name, " · ".join(items)) for name, items in (("at peak", owners), ("saved", tensors)) if items]
    if memory.leaked_bytes:
        leaks = [row for row in memory.retained.rows if row.leaks]
        what = "".join(f": {row.what} in {row.layer}" + (f", {row.line}" if row.line else "") for row in leaks[:1])
        texts.append(("leak", f"{units.size(memory.leaked_bytes)} more with every step{what}"))
    about = "largest owners at the peak, largest tensors saved for backward"
    return Section("memory", "Memory", about, (KeyValues(tuple(texts)),))


def memory_sections(view: View) -> list[Section]:
    """The sections on memory in the order of reading; none where it was not measured."""
    memory, info = view.memory, view.run.memory
    if memory is None or info is None:
        return []
    whole, left = units.size(memory.saved.whole), units.size(memory.retained.whole)
    saved = (
        f"{whole}{units.over_passes(info.backward_passes)}; each storage once, with the layer and line that saved it "
        "first"
    )
    retained = f"{left} that are no parameter, gradient, buffer or optimizer state"
    if memory.leaked_bytes:
        retained += f"; LEAK: {units.size(memory.leaked_bytes)} more with every step"
    held = f"{units.size(memory.held.whole)} that no backward node needs: a variable or a container still refers to it"
    allocated = (
        f"{units.count(info.allocations)} {'allocation' if info.allocations == 1 else 'allocations'}, "
        f"{units.size(info.step_allocated_bytes)} in all"
    )
    found = [
        _holders(memory, peak_words(info, view.run.workload.model)),
        Section("memory", "Memory over the step", allocated, (memory.course,)),
        _tensors("saved", "Saved for backward", saved, "tensor", memory.saved),
        _tensors("retained", "Retained after the step", retained, "made by", memory.retained),
        _tensors("held", "Held by Python", held, "made by", memory.held),
        _copies(memory),
        _device(info),
    ]
    return [section for section in found if section is not None]


def _holders(memory: MemoryView, peak: str) -> Section | None:
    holders = memory.holders
    if not holders.whole:
        return None
    columns = (
        Column("owner", "owner", align="left", least=20, most=44, cut="front"),
        Column("bytes", "held"),
        Column("share", "share", drop=1),
        Column("bar", "", align="left", drop=2, least=8, most=24),
        Column("category", "what", align="left"),
    )
    rows = []
    for holder, percent in zip(holders.rows, holders.percents, strict=False):
        share = holders.share(holder.bytes)
        accent = heat(share)
        numbers = (Cell(units.size(holder.bytes), accent), Cell(percent, accent))
        rows.append(Row((code(holder.owner), *numbers, Bar(share, share), Cell(holder.category, "dim"))))
    if holders.more:
        share = holders.share(holders.more_bytes)
        rows.append(Row((*_more(holders), Bar(share, share)), "rest"))
    rows.append(Row(strong(["all of the peak", units.size(holders.whole), "100.0 %"]), "whole"))
    kinds = " · ".join(f"{name} {units.size(size)}" for name, size in memory.categories)
    blocks = (KeyValues((("by kind", kinds),)), Table(columns, tuple(rows)))
    return Section("memory", "Memory at peak, by owner", peak, blocks)


def _tensors(key: str, title: str, about: str, head: str, tensors: Largest[KeptTensors]) -> Section | None:
    if not tensors.rows and not tensors.more:
        return None
    has_each = any(tensor.each is not None for tensor in tensors.rows)
    has_lines = any(tensor.line for tensor in tensors.rows)
    columns = (
        Column("what", head, align="left", least=42, most=72),
        Column("bytes", "bytes"),
        Column("share", "share", drop=3),
        Column("count", "count", drop=1),
        *([Column("each", "each", drop=2)] if has_each else []),
        *([Column("line", "line", align="left", least=18, most=32, cut="front")] if has_lines else []),
        Column("layer", "layer", align="left", drop=4, least=18, most=40, cut="front"),
    )
    rows = []
    for tensor, percent in zip(tensors.rows, tensors.percents, strict=False):
        accent = "warn" if tensor.leaks else heat(tensors.share(tensor.bytes))
        cells = [
            Cell(f"LEAK {tensor.what}", "warn") if tensor.leaks else Cell(tensor.what),
            Cell(units.size(tensor.bytes), accent),
            Cell(percent, accent),
            Cell(units.count(tensor.count)),
        ]
        if has_each:
            cells.append(Cell(units.size(tensor.each) if tensor.each is not None else ""))
        if has_lines:
            cells.append(_line(tensor.line))
        rows.append(Row((*cells, code(tensor.layer, "dim"))))
    if tensors.more:
        rows.append(Row(_more(tensors), "rest"))
    return Section(key, title, about, (Table(columns, tuple(rows)),))


def _copies(memory: MemoryView) -> Section | None:
    copies = memory.copies
    if not copies.rows and not copies.more:
        return None
    columns = (
        Column("line", "line", align="left", least=16, most=36, cut="front"),
        Column("bytes", "bytes"),
        Column("share", "share"),
        Column("calls", "calls", drop=3),
        Column("op", "op", align="left", least=16, most=40),
        Column("phase", "phase", align="left", drop=1),
        Column("layer", "layer", align="left", drop=2, least=12, most=40, cut="front"),
    )
    rows = []
    for copy, percent in zip(copies.rows, copies.percents, strict=False):
        accent = heat(copies.share(copy.bytes))
        numbers = (Cell(units.size(copy.bytes), accent), Cell(percent, accent), Cell(units.count(copy.calls)))
        rows.append(Row((_line(copy.line), *numbers, code(copy.op), Cell(copy.phase, "dim"), code(copy.layer, "dim"))))
    if copies.more:
        rows.append(Row(_more(copies), "rest"))
    about = f"{units.size(copies.whole)} written by contiguous, clone, cat, reshape and the like"
    return Section("copies", "Copies", about, (Table(columns, tuple(rows)),))


def _line(line: str) -> Cell:
    return code(line) if line else Cell(NO_LINE, "dim")


def _more(largest: Largest[Holder] | Largest[KeptTensors] | Largest[Copy]) -> tuple[Cell, ...]:
    """The cells of what is not shown; its bytes and share come right after the name."""
    return dim([f"… {largest.more} more", units.size(largest.more_bytes), largest.percents[-1]])


def _device(memory: MemoryInfo) -> Section | None:
    figures, outside = allocator_words(memory), outside_words(memory)
    if not figures:
        return None
    blocks = (Words(outside),) if outside else ()
    return Section("memory", f"On {memory.device}", f"at the peak: {figures}", blocks)
