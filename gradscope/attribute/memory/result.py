"""Blocks of the measured step -> the memory part of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.memory.blocks import NEVER
from gradscope.attribute.memory.by_layer import (
    LayerMemory,
    LineMemory,
    amounts_of_layers,
    amounts_of_lines,
    find_copies,
)
from gradscope.attribute.memory.event_owners import phase_of
from gradscope.attribute.memory.liveset import (
    backward_passes,
    held_at_peak,
    held_rows,
    holders_at,
    retained_rows,
    saved_rows,
)
from gradscope.attribute.memory.step import MeasuredStep, MemoryInput, SourceText, read_step
from gradscope.attribute.memory.timeline import categories_of, kept_entries, owners_of, phases_of, spans_of, timeline_of
from gradscope.tables import BlockTable, CopyRow, IntColumn, MemoryInfo, ModuleInfo


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """What the memory pass gives a report."""

    info: MemoryInfo
    blocks: BlockTable
    layers: tuple[LayerMemory, ...]
    lines: Mapping[tuple[str, int], LineMemory]


def read_memory(given: MemoryInput, modules: Sequence[ModuleInfo], source_text: SourceText) -> MemoryResult:
    """Read the memory pass.

    Args:
        modules: the rows of the layer table.
        source_text: (file, line) -> (name to show, text of the line).
    """
    step = read_step(given, modules, source_text)
    copies, copied_by_layer, copied_by_line = _copies(step)
    return MemoryResult(
        _info(step, given, copies),
        _block_table(step),
        amounts_of_layers(step, copied_by_layer),
        amounts_of_lines(step, copied_by_line),
    )


def _info(step: MeasuredStep, given: MemoryInput, copies: tuple[CopyRow, ...]) -> MemoryInfo:
    trace, running = step.trace, step.running
    peak = running.peak
    row = np.array([_row_at(step, peak)], np.int64)
    saved, held, retained = saved_rows(step), held_rows(step), retained_rows(step)
    sizes = step.allocated()[1]
    on_device = given.device_used is not None and given.device_reserved is not None
    phases = phases_of(trace)
    entries = kept_entries(trace, running, phases)
    spans, spans_left_out = spans_of(trace, step.modules)
    return MemoryInfo(
        device=given.device,
        peak_bytes=int(running.total[peak]),
        peak_ns=int(running.time_ns[peak]) - trace.start_ns,
        peak_phase=phase_of(int(trace.category(row)[0])),
        peak_layer=step.path(int(trace.owner(row)[0])),
        peak_op=trace.op(row)[0],
        at_peak=holders_at(step, peak),
        start_bytes=int(running.total[0]),
        end_bytes=int(running.total[-1]),
        timeline=timeline_of(trace, running, entries),
        phases=phases,
        saved_bytes=sum(entry.bytes for entry in saved),
        saved=saved,
        held_bytes=sum(entry.bytes for entry in held),
        held=held,
        copied_bytes=sum(entry.bytes for entry in copies),
        copies=copies,
        allocations=len(sizes),
        step_allocated_bytes=int(sizes.sum()),
        retained_after_step_bytes=sum(entry.bytes for entry in retained),
        retained=retained,
        allocated_bytes=int(running.total[peak]) if on_device else None,
        reserved_bytes=_reserved(step, peak) if on_device else None,
        outside_allocator_bytes=_outside_allocator(given),
        device_total_bytes=given.device_total,
        categories=categories_of(running, step.blocks, step.found, entries),
        owners=owners_of(running, step.blocks, step.found, [module.path for module in step.modules], entries),
        spans=spans,
        spans_left_out=spans_left_out,
        saved_at_peak_bytes=sum(entry.at_peak_bytes or 0 for entry in saved),
        held_at_peak_bytes=held_at_peak(step),
        backward_passes=len(backward_passes(step)),
    )


def _row_at(step: MeasuredStep, entry: int) -> int:
    return int(step.blocks.events.row[step.running.first + entry - 1]) if entry > 0 else -1


def _reserved(step: MeasuredStep, entry: int) -> int | None:
    position = step.running.first + max(entry, 1) - 1
    reserved = step.blocks.events.reserved
    return int(reserved[position]) if position < len(reserved) else None


def _outside_allocator(given: MemoryInput) -> int | None:
    if given.device_used is None or given.device_reserved is None:
        return None
    return given.device_used - given.device_reserved


def _copies(step: MeasuredStep) -> tuple[tuple[CopyRow, ...], IntColumn, dict[int, int]]:
    groups, by_layer, by_line = find_copies(step.trace, *step.allocated(), len(step.modules))
    found = [
        CopyRow(step.path(key.layer), step.place(key.line), key.phase, key.op, calls, size)
        for key, (calls, size) in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes)), by_layer, by_line


def _block_table(step: MeasuredStep) -> BlockTable:
    found, first = step.found, step.running.first
    events = len(step.running.total) - 1
    born, died = step.blocks.born[found.block], step.blocks.died[found.block]
    return BlockTable(
        events=events,
        bytes=step.blocks.bytes[found.block],
        born=np.where(born < first, -1, born - first),
        died=np.where((died == NEVER) | (died - first > events), events, died - first),
        category=tuple(category.value for category in found.category),
        layer=found.layer,
        line=found.line,
        op=tuple(found.op),
        leaf=tuple(found.leaf),
    )
