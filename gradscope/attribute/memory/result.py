"""Blocks of the measured step -> the memory part of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope.attribute.memory.blocks import NEVER, Blocks, build_blocks, events_of
from gradscope.attribute.memory.classify import (
    backward_windows,
    classify,
    needed_until,
    saved_storages,
)
from gradscope.attribute.memory.copies import find_copies
from gradscope.attribute.memory.places import MemoryTrace, phase_of, read_places
from gradscope.attribute.memory.running import (
    alive_at,
    phases_of,
    rise_of_layers,
    run_total,
    timeline_of,
)
from gradscope.attribute.survey import SurveyInput
from gradscope.tables import (
    BlockTable,
    CopyRow,
    HeldRow,
    HolderRow,
    IntColumn,
    LayerRow,
    LineInfo,
    LineRow,
    MemoryCategory,
    MemoryInfo,
    ModuleInfo,
    RetainedRow,
    Role,
    RowKind,
    SavedRow,
    SavedTensor,
    Sighting,
)

SourceText = Mapping[tuple[str, int], tuple[str, str]]
_MODEL = {Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER}


@dataclass(frozen=True, slots=True)
class MemoryInput:
    """The memory pass's trace and what was noted while it ran."""

    survey: SurveyInput  # trace, line spans, graphs and parameters, as of a survey
    device: str
    sightings: Sequence[Sighting]  # ``layer`` is the row of the layer table
    saved: Sequence[SavedTensor]
    lines: Sequence[LineInfo]
    device_used: int | None = None  # CUDA: bytes in use on the device by everybody, and what there is
    device_reserved: int | None = None
    device_total: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """What the memory pass gives a report."""

    info: MemoryInfo
    blocks: BlockTable
    layers: tuple[_LayerMemory, ...]
    lines: Mapping[tuple[str, int], _LineMemory]


@dataclass(frozen=True, slots=True)
class _LayerMemory:
    saved_bytes: int
    saved_total_bytes: int
    peak_bytes: int
    forward_allocated_bytes: int
    forward_allocations: int
    backward_allocated_bytes: int
    backward_allocations: int
    copied_bytes: int


@dataclass(slots=True)
class _LineMemory:
    layer: int
    saved_bytes: int = 0
    allocated_bytes: int = 0
    copied_bytes: int = 0


def read_memory(given: MemoryInput, modules: Sequence[ModuleInfo], source_text: SourceText) -> MemoryResult:
    """Read the memory pass.

    Args:
        modules: the rows of the layer table.
        source_text: (file, line) -> (name to show, text of the line).
    """
    return _Reader(given, modules, source_text).result()


class _Reader:
    def __init__(self, given: MemoryInput, modules: Sequence[ModuleInfo], source_text: SourceText) -> None:
        self._given, self._modules, self._source = given, modules, source_text
        trace = self._trace = read_places(given.survey)
        table = trace.table
        assert table.allocations is not None
        rows = np.flatnonzero(table.kind == RowKind.SEEN)
        rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
        marks = list(zip(table.start_ns[rows].tolist(), table.argument[rows].tolist(), strict=True))
        base = _mark_at_start(trace, marks)
        events = events_of(table.allocations, given.device)
        self._blocks = build_blocks(events, marks, base, given.sightings, given.saved)
        self._end_mark = next((number for time, number in marks if time >= trace.end_ns), None)
        self._step_marks = {number for time, number in marks if trace.start_ns <= time < trace.end_ns}
        self._storages = saved_storages(trace, self._blocks, given.saved, self._step_marks)
        needed = needed_until(trace, self._blocks, given.saved, self._step_marks)
        self._found = classify(trace, self._blocks, self._storages, needed)
        self._running = run_total(trace, self._blocks, self._found)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def result(self) -> MemoryResult:
        trace, running, given = self._trace, self._running, self._given
        peak = running.peak
        row = np.array([self._row_at(peak)], np.int64)
        at_peak = self._at_peak(peak)
        saved = self._saved_rows()
        held = self._held_rows()
        copies, copied_by_layer, copied_by_line = self._copies()
        retained = self._retained_rows()
        sizes = self._allocated_sizes()
        reserved = self._reserved(peak)
        beyond = None
        if given.device_used is not None and given.device_reserved is not None:
            beyond = given.device_used - given.device_reserved
        info = MemoryInfo(
            device=given.device,
            peak_bytes=int(running.total[peak]),
            peak_ns=int(running.time_ns[peak]) - trace.start_ns,
            peak_phase=phase_of(int(trace.category(row)[0])),
            peak_layer=self._path(int(trace.owner(row)[0])),
            peak_op=trace.op(row)[0],
            at_peak=at_peak,
            start_bytes=int(running.total[0]),
            end_bytes=int(running.total[-1]),
            timeline=timeline_of(trace, running),
            phases=phases_of(trace),
            saved_bytes=sum(entry.bytes for entry in saved),
            saved=saved,
            held_bytes=sum(entry.bytes for entry in held),
            held=held,
            copied_bytes=sum(entry.bytes for entry in copies),
            copies=copies,
            allocations=len(sizes[0]),
            step_allocated_bytes=int(sizes[1].sum()),
            retained_after_step_bytes=sum(entry.bytes for entry in retained),
            retained=retained,
            allocated_bytes=int(running.total[peak]) if reserved is not None else None,
            reserved_bytes=reserved,
            outside_allocator_bytes=beyond,
            device_total_bytes=given.device_total,
        )
        layers = self._layers(sizes, copied_by_layer)
        return MemoryResult(info, self._block_table(), layers, self._lines(sizes, copied_by_line))

    def _row_at(self, entry: int) -> int:
        return int(self._blocks.events.row[self._running.first + entry - 1]) if entry > 0 else -1

    def _reserved(self, entry: int) -> int | None:
        if self._given.device_reserved is None:
            return None
        position = self._running.first + max(entry, 1) - 1
        return int(self._blocks.events.reserved[position]) if position < len(self._blocks.events) else None

    def _path(self, layer: int) -> str | None:
        return self._modules[layer].path if layer >= 0 else None

    def _place(self, line: int) -> str | None:
        if line < 0:
            return None
        info = self._given.lines[line]
        return f"{self._source.get((info.file, info.line), (info.file, ''))[0]}:{info.line}"

    # -- the live set ------------------------------------------------------------------------------------------------

    def _at_peak(self, entry: int) -> tuple[HolderRow, ...]:
        found, time = self._found, int(self._running.time_ns[entry])
        held: dict[tuple[int, MemoryCategory], int] = defaultdict(int)
        for index in alive_at(self._running, self._blocks, found, entry).tolist():
            category = found.category[index]
            if category is MemoryCategory.SAVED and _released(int(found.saved_until[index]), time):
                category = MemoryCategory.ACTIVATION  # every node that kept it has run: somebody else holds it
            held[int(found.layer[index]), category] += int(self._blocks.bytes[found.block[index]])
        rows = [HolderRow(self._path(layer), category.value, size) for (layer, category), size in held.items()]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.owner or "", row.category)))

    def _saved_rows(self) -> tuple[SavedRow, ...]:
        groups: dict[tuple[int, int, str, str, str, str], list[int]] = defaultdict(list)
        for storage in self._storages:
            note = storage.note
            key = (storage.layer, storage.line, note.node, note.what, note.shape, note.dtype)
            groups[key].append(note.bytes)
        rows = [
            SavedRow(self._path(layer), self._place(line), node, what, shape, dtype, len(sizes), sum(sizes))
            for (layer, line, node, what, shape, dtype), sizes in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def _held_rows(self) -> tuple[HeldRow, ...]:
        """Other activations that were alive when a backward pass of the step began, each block once."""
        found, trace = self._found, self._trace
        blocks: set[int] = set()
        for start in backward_windows(trace)[0].tolist():
            if not trace.start_ns <= start < trace.end_ns:
                continue
            entry = int(np.searchsorted(self._running.time_ns, start, side="right")) - 1
            blocks |= set(alive_at(self._running, self._blocks, found, entry).tolist())
        groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for index in sorted(blocks):
            if found.category[index] is MemoryCategory.ACTIVATION:
                key = (int(found.layer[index]), int(found.line[index]), found.op[index])
                groups[key].append(int(self._blocks.bytes[found.block[index]]))
        rows = [
            HeldRow(self._path(layer), self._place(line), op, len(sizes), sum(sizes))
            for (layer, line, op), sizes in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def _retained_rows(self) -> tuple[RetainedRow, ...]:
        """What the step left behind, and whether the step before left the same behind and it is there still."""
        found, trace = self._found, self._trace
        last = self._running.first + len(self._running.total) - 1
        groups: dict[tuple[int, int, str, str], list[int]] = defaultdict(list)
        older: set[tuple[int, int, str]] = set()  # no phase: only in the measured step is it known when forward begins
        category_of = trace.category(found.row)
        for index, block in enumerate(found.block.tolist()):
            if self._blocks.died[block] < last or self._blocks.born[block] < 0:
                continue
            if self._is_models(block):
                continue
            phase = phase_of(int(category_of[index]))
            owner = trace.owner(found.row[index : index + 1])
            line = trace.line(found.row[index : index + 1])
            key = (int(owner[0]), int(line[0]), found.op[index], phase)
            if self._blocks.born[block] < self._running.first:
                older.add(key[:3])
            elif found.category[index] is not MemoryCategory.INPUT or not _still_given(self._blocks, block):
                groups[key].append(int(self._blocks.bytes[block]))
        rows = [
            RetainedRow(self._path(layer), self._place(line), op, phase, len(sizes), sum(sizes), key[:3] in older)
            for key, sizes in groups.items()
            for layer, line, op, phase in (key,)
        ]
        return tuple(sorted(rows, key=lambda row: (not row.grows, -row.bytes)))

    def _is_models(self, block: int) -> bool:
        """Whether a block was the model's or an optimizer's when the step had ended: not whether it once was."""
        return any(entry.mark == self._end_mark and entry.role in _MODEL for entry in self._blocks.seen[block])

    # -- allocations -------------------------------------------------------------------------------------------------

    def _allocated_sizes(self) -> tuple[IntColumn, IntColumn]:
        """Row and size of every allocation of the step."""
        events = self._blocks.events
        first = self._running.first
        step = slice(first, first + len(self._running.total) - 1)
        given = events.bytes[step] > 0
        return events.row[step][given].astype(np.int64), events.bytes[step][given]

    def _copies(self) -> tuple[tuple[CopyRow, ...], IntColumn, dict[int, int]]:
        rows, sizes = self._allocated_sizes()
        groups, by_layer, by_line = find_copies(self._trace, rows, sizes, len(self._modules))
        found = [
            CopyRow(self._path(key.layer), self._place(key.line), key.phase, key.op, calls, size)
            for key, (calls, size) in groups.items()
        ]
        return tuple(sorted(found, key=lambda row: -row.bytes)), by_layer, by_line

    def _layers(self, sizes: tuple[IntColumn, IntColumn], copied: IntColumn) -> tuple[_LayerMemory, ...]:
        trace, count = self._trace, len(self._modules)
        rows, size = sizes
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
        for storage in self._storages:
            if storage.layer >= 0:
                saved[storage.layer] += storage.note.bytes
        total = self._totals(saved)
        rise = rise_of_layers(trace, self._running, count)
        return tuple(
            _LayerMemory(
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

    def _totals(self, own: IntColumn) -> IntColumn:
        """Each layer with all below it; parents come before their children."""
        row_of = {info.path: row for row, info in enumerate(self._modules)}
        total = own.copy()
        for row in range(len(self._modules) - 1, -1, -1):
            parent = self._modules[row].parent
            if parent is not None:
                total[row_of[parent]] += total[row]
        return total

    def _lines(
        self, sizes: tuple[IntColumn, IntColumn], copied: Mapping[int, int]
    ) -> dict[tuple[str, int], _LineMemory]:
        rows, size = sizes
        found: dict[tuple[str, int], _LineMemory] = {}

        def entry(line: int, layer: int) -> _LineMemory:
            info = self._given.lines[line]
            return found.setdefault((info.file, info.line), _LineMemory(layer))

        for storage in self._storages:
            if storage.line >= 0:
                entry(storage.line, storage.layer).saved_bytes += storage.note.bytes
        columns = (self._trace.line(rows), self._trace.owner(rows), size)
        for line, layer, amount in zip(*(column.tolist() for column in columns), strict=True):
            if line >= 0:
                entry(line, layer).allocated_bytes += amount
        for line, amount in copied.items():
            if line >= 0:
                entry(line, -1).copied_bytes += amount
        return found

    def _block_table(self) -> BlockTable:
        found, first = self._found, self._running.first
        events = len(self._running.total) - 1
        born, died = self._blocks.born[found.block], self._blocks.died[found.block]
        return BlockTable(
            events=events,
            bytes=self._blocks.bytes[found.block],
            born=np.where(born < first, -1, born - first),
            died=np.where((died == NEVER) | (died - first > events), events, died - first),
            category=tuple(category.value for category in found.category),
            layer=found.layer,
            line=found.line,
            op=tuple(found.op),
            leaf=tuple(found.leaf),
        )


def _mark_at_start(trace: MemoryTrace, marks: Sequence[tuple[int, int]]) -> int:
    """The moment between the steps at which everything was noted: the last one before the marker of the step."""
    table = trace.table
    steps = np.flatnonzero((table.kind == RowKind.STEP) & (table.argument == 1))
    boundary = int(table.start_ns[steps[0]])
    return max((time, number) for time, number in marks if time <= boundary)[1]


def _released(until: int, time: int) -> bool:
    return np.iinfo(np.int64).min < until < time


def _still_given(blocks: Blocks, block: int) -> bool:
    """Whether the block is the batch of the step, which the loop that made it holds by right."""
    return any(entry.role == Role.INPUT for entry in blocks.seen[block])


def _side(category: int) -> str:
    phase = phase_of(category)
    return "backward" if phase == "recompute" else phase


def with_memory_of_layers(rows: Sequence[LayerRow], memory: MemoryResult) -> tuple[LayerRow, ...]:
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
        for row, found in zip(rows, memory.layers, strict=True)
    )


def with_memory_of_lines(
    rows: Sequence[LineRow],
    memory: MemoryResult,
    lines: Sequence[LineInfo],
    modules: Sequence[ModuleInfo],
    source_text: SourceText,
) -> tuple[LineRow, ...]:
    """The lines with their memory columns; lines that only the memory pass saw come last.

    Args:
        lines: the lines of the memory pass.
    """
    shown = {place: source_text.get(place, (place[0], "")) for place in {(info.file, info.line) for info in lines}}
    by_name = {(shown[place][0], place[1]): place for place in memory.lines}
    result = []
    for row in rows:
        place = by_name.pop((row.file, row.line), None)
        found = memory.lines[place] if place is not None else _LineMemory(-1)
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
        found = memory.lines[place]
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
