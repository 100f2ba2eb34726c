"""Bytes saved, allocated and copied by each layer and each source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradscope.attribute.memory.event_owners import MemoryTrace, phase_of
from gradscope.attribute.memory.step import MeasuredStep, SourceText, rise_of_layers
from gradscope.ops import ATEN_COPIES, ATEN_EMPTIES, ATEN_REPEAT
from gradscope.tables import IntColumn, LayerRow, LineInfo, LineRow, ModuleInfo


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory columns of one layer."""

    saved_bytes: int
    saved_total_bytes: int
    peak_bytes: int
    forward_allocated_bytes: int
    forward_allocations: int
    backward_allocated_bytes: int
    backward_allocations: int
    copied_bytes: int


@dataclass(slots=True)
class LineMemory:
    """The memory columns of one source line."""

    layer: int  # one that spent memory there; -1: outside every module
    saved_bytes: int = 0
    allocated_bytes: int = 0
    copied_bytes: int = 0


def amounts_of_layers(step: MeasuredStep, copied: IntColumn) -> tuple[LayerMemory, ...]:
    """Return the amounts of every layer, in the order of the layer table; ``copied`` has the bytes of its copies."""
    trace, count = step.trace, len(step.modules)
    rows, size = step.allocated()
    owner, category = trace.owner(rows), trace.category(rows)
    columns = {}
    for phase in ("forward", "backward"):
        is_phase = np.array([_side(int(value)) == phase for value in category], bool)
        mine = (owner >= 0) & is_phase
        columns[phase] = (
            np.bincount(owner[mine], minlength=count),
            np.bincount(owner[mine], weights=size[mine], minlength=count).astype(np.int64),
        )
    saved = np.zeros(count, np.int64)
    for storage in step.storages:
        if storage.layer >= 0:
            saved[storage.layer] += storage.note.bytes
    total = _totals(step, saved)
    rise = rise_of_layers(trace, step.running, count)
    return tuple(
        LayerMemory(
            saved_bytes=int(saved[index]),
            saved_total_bytes=int(total[index]),
            peak_bytes=int(rise[index]),
            forward_allocated_bytes=int(columns["forward"][1][index]),
            forward_allocations=int(columns["forward"][0][index]),
            backward_allocated_bytes=int(columns["backward"][1][index]),
            backward_allocations=int(columns["backward"][0][index]),
            copied_bytes=int(copied[index]),
        )
        for index in range(count)
    )


def _totals(step: MeasuredStep, own: IntColumn) -> IntColumn:
    """Sum each layer with all below it; parents come before their children."""
    row_of = {info.path: row for row, info in enumerate(step.modules)}
    total = own.copy()
    for row in range(len(step.modules) - 1, -1, -1):
        parent = step.modules[row].parent
        if parent is not None:
            total[row_of[parent]] += total[row]
    return total


def amounts_of_lines(step: MeasuredStep, copied: Mapping[int, int]) -> dict[tuple[str, int], LineMemory]:
    """Return the amounts of every line that saved or allocated something; ``copied`` has the bytes of its copies."""
    rows, size = step.allocated()
    found: dict[tuple[str, int], LineMemory] = {}

    def entry(line: int, layer: int) -> LineMemory:
        info = step.lines[line]
        return found.setdefault((info.file, info.line), LineMemory(layer))

    for storage in step.storages:
        if storage.line >= 0:
            entry(storage.line, storage.layer).saved_bytes += storage.note.bytes
    columns = (step.trace.line(rows), step.trace.owner(rows), size)
    for line, layer, amount in zip(*(column.tolist() for column in columns), strict=True):
        if line >= 0:
            entry(line, layer).allocated_bytes += amount
    for line, amount in copied.items():
        if line >= 0:
            entry(line, -1).copied_bytes += amount
    return found


def _side(category: int) -> str:
    phase = phase_of(category)
    return "backward" if phase == "recompute" else phase


def with_memory_of_layers(rows: Sequence[LayerRow], memory: Sequence[LayerMemory]) -> tuple[LayerRow, ...]:
    """The layers with their memory columns."""
    return tuple(
        replace(
            row,
            saved_bytes=found.saved_bytes,
            saved_total_bytes=found.saved_total_bytes,
            peak_bytes=found.peak_bytes,
            allocated_bytes=found.forward_allocated_bytes + found.backward_allocated_bytes,
            allocations=found.forward_allocations + found.backward_allocations,
            forward_allocated_bytes=found.forward_allocated_bytes,
            forward_allocations=found.forward_allocations,
            backward_allocated_bytes=found.backward_allocated_bytes,
            backward_allocations=found.backward_allocations,
            copied_bytes=found.copied_bytes,
        )
        for row, found in zip(rows, memory, strict=True)
    )


def with_memory_of_lines(
    rows: Sequence[LineRow],
    memory: Mapping[tuple[str, int], LineMemory],
    lines: Sequence[LineInfo],
    modules: Sequence[ModuleInfo],
    source_text: SourceText,
) -> tuple[LineRow, ...]:
    """The lines with their memory columns; lines that only the memory pass saw come last.

    Args:
        lines: the lines of the memory pass.
    """
    shown = {place: source_text.get(place, (place[0], "")) for place in {(info.file, info.line) for info in lines}}
    by_name = {(shown[place][0], place[1]): place for place in memory}
    result = []
    for row in rows:
        place = by_name.pop((row.file, row.line), None)
        found = memory[place] if place is not None else LineMemory(-1)
        result.append(
            replace(
                row,
                saved_bytes=found.saved_bytes,
                allocated_bytes=found.allocated_bytes,
                copied_bytes=found.copied_bytes,
            )
        )
    functions = {(info.file, info.line): info.function for info in lines}
    for (name, number), place in by_name.items():
        found = memory[place]
        path = modules[found.layer].path if found.layer >= 0 else None
        result.append(
            LineRow(
                name,
                number,
                functions[place],
                shown[place][1],
                path,
                forward_ns=0,
                backward_ns=0,
                saved_bytes=found.saved_bytes,
                allocated_bytes=found.allocated_bytes,
                copied_bytes=found.copied_bytes,
            )
        )
    return tuple(result)


BoolColumn = npt.NDArray[np.bool_]


class CopyKey(NamedTuple):
    """What copies are grouped by."""

    layer: int
    line: int
    phase: str
    op: str


def find_copies(
    trace: MemoryTrace, rows: IntColumn, sizes: IntColumn, layers: int
) -> tuple[dict[CopyKey, tuple[int, int]], IntColumn, dict[int, int]]:
    """Group the allocations that copies made.

    Args:
        rows, sizes: trace row and bytes of each allocation of the step.

    Returns:
        (calls, bytes) of each group; bytes of each layer; bytes of each line, -1 for no line.
    """
    known = rows >= 0
    rows, sizes = rows[known], sizes[known]
    inside = _by_copies(trace, rows)
    rows, sizes = rows[inside], sizes[inside]
    groups: dict[CopyKey, tuple[int, int]] = defaultdict(lambda: (0, 0))
    by_layer, by_line = np.zeros(layers, np.int64), defaultdict[int, int](int)
    columns = (trace.owner(rows).tolist(), trace.line(rows).tolist(), trace.category(rows).tolist())
    for layer, line, category, op, size in zip(*columns, trace.op(rows), sizes.tolist(), strict=True):
        key = CopyKey(layer, line, phase_of(category), op)
        calls, total = groups[key]
        groups[key] = (calls + 1, total + size)
        by_line[line] += size
        if layer >= 0:
            by_layer[layer] += size
    return dict(groups), by_layer, dict(by_line)


def _by_copies(trace: MemoryTrace, rows: IntColumn) -> BoolColumn:
    """Return which of the allocations in ``rows`` a copying op made, itself or in what it called."""
    table = trace.table
    kinds = (ATEN_COPIES, {ATEN_REPEAT}, ATEN_EMPTIES)
    copying, repeat, empty = (np.array([name in kind for name in table.names], bool) for kind in kinds)
    found = np.zeros(len(rows), bool)
    climbing, at, direct = np.arange(len(rows)), rows.copy(), np.ones(len(rows), bool)
    while len(climbing):
        is_op = trace.outer_op[at] >= 0
        climbing, at, direct = climbing[is_op], at[is_op], direct[is_op]
        name = table.name[at]
        found[climbing[copying[name]]] = True
        found[climbing[repeat[name] & ~direct]] = False
        direct &= empty[name]
        below = table.parent[at] >= 0
        climbing, at, direct = climbing[below], table.parent[at[below]].astype(np.int64), direct[below]
    return found
