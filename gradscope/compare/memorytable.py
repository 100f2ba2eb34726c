"""The table of layers whose own memory changed; bytes are exact, so every difference is one."""

from __future__ import annotations

from collections.abc import Sequence

from gradscope import units
from gradscope.compare import messages
from gradscope.compare.changes import Change, Comparison, MemoryChange
from gradscope.compare.groups import OWN_SIZES
from gradscope.compare.layers import SIZES
from gradscope.compare.layertable import layer_cell, style_of
from gradscope.compare.options import DiffOptions
from gradscope.document.parts import Cell, Column, Row, Section, Table, code, dim, plain


def changed_memory(comparison: Comparison, options: DiffOptions) -> Section | None:
    """Layers that save, allocate or copy more or less than before, those that save most of it first."""
    columns = (
        Column("path", "layer", align="left", least=24, most=56, cut="front"),
        Column("class", "class", align="left", drop=4, least=9, most=24),
        Column("saved_before", "saved before"),
        Column("saved_after", "saved after"),
        Column("change", "change"),
        Column("allocated", "allocated"),
        Column("allocations", "allocs", drop=2),
        Column("copied", "copied", drop=3),
    )
    found = sorted(comparison.memory, key=_rank)
    shown, more = found[: options.top], found[options.top :]
    rows = [
        Row((layer_cell(group.address, len(group.paths)), code(group.class_name, "dim"), *_cells([group])))
        for group in shown
    ]
    if more:
        count = sum(len(group.paths) for group in more)
        rows.append(Row((*dim([f"… {count} more layers", ""]), *_cells(more)), "rest"))
    about = "each layer's own bytes, exact; numbers with a sign are differences"
    return Section("memory", "Memory of layers", about, (Table(columns, tuple(rows)),)) if rows else None


def _rank(group: MemoryChange) -> tuple[int, ...]:
    return tuple(-abs(_difference([group], metric) or 0) for metric in OWN_SIZES)


def _cells(groups: Sequence[MemoryChange]) -> list[Cell]:
    saved = [group.changes["saved_bytes"] for group in groups if "saved_bytes" in group.changes]
    sums = [sum(amounts) for amounts in zip(*((one.before or 0, one.after or 0) for one in saved), strict=True)]
    cells = [*plain([units.size(amount) for amount in sums or (None, None)])]
    for metric in OWN_SIZES:
        difference = _difference(groups, metric)
        cells.append(Cell(messages.signed(difference, SIZES[metric]), style_of(difference) if difference else "dim"))
    return cells


def _difference(groups: Sequence[MemoryChange], metric: str) -> int | None:
    found: list[Change] = [group.changes[metric] for group in groups if metric in group.changes]
    return sum(change.difference or 0 for change in found) if found else None
