"""Memory on a terminal: who holds the peak, its course, what is saved for backward, copies, and what stays alive."""

from __future__ import annotations

from gradscope import units
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line
from gradscope.report.memory import Copy, KeptTensors, Largest, MemoryView
from gradscope.report.style import heat, share_bar, titled, wrapped
from gradscope.report.timeline import timeline_lines
from gradscope.report.view import View

NO_LINE = "no source line"


def memory_sections(view: View, width: int, marks: Glyphs) -> list[list[Line]]:
    """The sections on memory in the order of reading; none where it was not measured."""
    memory = view.memory
    if memory is None:
        return []
    sections = [
        _holders(memory, width, marks),
        timeline_lines(memory, width, marks),
        _saved(memory, width, marks),
        _retained(memory, width, marks),
        _held(memory, width, marks),
        _copies(memory, width, marks),
        _device(memory, width, marks),
    ]
    return [section for section in sections if section]


def _holders(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    holders = memory.holders
    if not holders.whole:
        return []
    grid = Grid(
        [
            Column("owner", "left", least=20, most=44, cut="front"),
            Column("held"),
            Column("share", drop=1),
            Column("", "left", drop=2, least=8, most=24),
            Column("what", "left"),
        ]
    )
    for holder, percent in zip(holders.rows, holders.percents, strict=False):
        share = holders.share(holder.bytes)
        grid.row(
            [(marks.text(holder.owner), "")],
            [(units.size(holder.bytes), heat(share))],
            [(percent, heat(share))],
            share_bar(share, marks),
            [(marks.text(holder.category), "dim")],
        )
    if holders.more:
        share = holders.share(holders.more_bytes)
        more: Line = [(marks.text(f"… {holders.more} more"), "dim")]
        numbers: list[Line] = [[(units.size(holders.more_bytes), "dim")], [(holders.percents[-1], "dim")]]
        grid.row(more, *numbers, share_bar(share, marks), [])
    whole: list[Line] = [[("all of the peak", "strong")], [(units.size(holders.whole), "strong")]]
    grid.row(*whole, [("100.0 %", "strong")], [], [])
    kinds = " · ".join(f"{name} {units.size(size)}" for name, size in memory.categories)
    return [
        *titled("Who holds the peak", memory.peak, width, marks),
        *wrapped(kinds, width, marks, first="by kind  "),
        *grid.lines(width, marks),
    ]


def _saved(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    whole = f"{units.size(memory.saved.whole)}{memory.passes}"
    about = f"{whole}; each storage once, with the layer and line that first kept it"
    return _tensors("Saved for backward", about, "tensor", memory.saved, width, marks)


def _retained(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    about = f"{units.size(memory.retained.whole)} that are no parameter, gradient, buffer or optimizer state"
    if memory.leaked_bytes:
        about += f"; LEAK: {units.size(memory.leaked_bytes)} more with every step"
    return _tensors("Retained after the step", about, "made by", memory.retained, width, marks)


def _held(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    about = f"{units.size(memory.held.whole)} that no backward node needs: a variable or a container still refers to it"
    return _tensors("Held by Python", about, "made by", memory.held, width, marks)


def _tensors(title: str, about: str, head: str, tensors: Largest[KeptTensors], width: int, marks: Glyphs) -> list[Line]:
    if not tensors.rows and not tensors.more:
        return []
    has_each = any(tensor.each is not None for tensor in tensors.rows)
    has_lines = any(tensor.line for tensor in tensors.rows)
    grid = Grid(
        [
            Column(head, "left", least=42, most=72),
            Column("bytes"),
            Column("share", drop=3),
            Column("count", drop=1),
            *([Column("each", drop=2)] if has_each else []),
            *([Column("line", "left", least=18, most=32, cut="front")] if has_lines else []),
            Column("layer", "left", drop=4, least=18, most=40, cut="front"),
        ]
    )
    for tensor, percent in zip(tensors.rows, tensors.percents, strict=False):
        accent = "warn" if tensor.leaks else heat(tensors.share(tensor.bytes))
        grid.row(
            [(marks.text(f"LEAK {tensor.what}" if tensor.leaks else tensor.what), "warn" if tensor.leaks else "")],
            [(units.size(tensor.bytes), accent)],
            [(percent, accent)],
            [(units.count(tensor.count), "")],
            *([[(units.size(tensor.each) if tensor.each is not None else "", "")]] if has_each else []),
            *([[(marks.text(tensor.line or NO_LINE), "" if tensor.line else "dim")]] if has_lines else []),
            [(marks.text(tensor.layer), "dim")],
        )
    _more(grid, tensors, marks)
    return [*titled(title, about, width, marks), *grid.lines(width, marks)]


def _copies(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    copies = memory.copies
    if not copies.rows and not copies.more:
        return []
    grid = Grid(
        [
            Column("line", "left", least=16, most=36, cut="front"),
            Column("bytes"),
            Column("share"),
            Column("calls", drop=3),
            Column("op", "left", least=16, most=40),
            Column("phase", "left", drop=1),
            Column("layer", "left", drop=2, least=12, most=40, cut="front"),
        ]
    )
    for copy, percent in zip(copies.rows, copies.percents, strict=False):
        grid.row(*_copy_cells(copy, percent, copies.share(copy.bytes), marks))
    _more(grid, copies, marks)
    about = f"{units.size(copies.whole)} written by contiguous, clone, cat, reshape and the like"
    return [*titled("Copies", about, width, marks), *grid.lines(width, marks)]


def _copy_cells(copy: Copy, percent: str, share: float, marks: Glyphs) -> list[Line]:
    return [
        [(marks.text(copy.line or NO_LINE), "" if copy.line else "dim")],
        [(units.size(copy.bytes), heat(share))],
        [(percent, heat(share))],
        [(units.count(copy.calls), "")],
        [(marks.text(copy.op), "")],
        [(marks.text(copy.phase), "dim")],
        [(marks.text(copy.layer), "dim")],
    ]


def _more(grid: Grid, largest: Largest[KeptTensors] | Largest[Copy], marks: Glyphs) -> None:
    """The row for what is not shown; its bytes and share come right after the name."""
    if largest.more:
        cells: list[Line] = [
            [(marks.text(f"… {largest.more} more"), "dim")],
            [(units.size(largest.more_bytes), "dim")],
            [(largest.percents[-1], "dim")],
        ]
        grid.row(*cells, *[[] for _ in grid.columns[len(cells) :]])


def _device(memory: MemoryView, width: int, marks: Glyphs) -> list[Line]:
    if not memory.figures:
        return []
    lines = titled(f"On {marks.text(memory.device)}", f"at the peak: {memory.figures}", width, marks)
    return lines + (wrapped(memory.outside, width, marks) if memory.outside else [])
