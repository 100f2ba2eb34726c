"""The measured step of the memory pass, read: trace, blocks, what they are, and the running total with its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradscope.attribute.compiled.read import read_compiled
from gradscope.attribute.memory.blocks import Blocks, build_blocks, events_of
from gradscope.attribute.memory.classify import Classified, SavedStorage, classify, needed_until, saved_storages
from gradscope.attribute.memory.event_owners import MemoryTrace, read_places
from gradscope.attribute.memory.graphs import at_kernels, at_reader
from gradscope.attribute.survey import SurveyInput
from gradscope.tables import CompiledGraph, IntColumn, LineInfo, ModuleInfo, RowKind, SavedTensor, Sighting


@dataclass(frozen=True, slots=True)
class Running:
    """Bytes alive after each allocator event of the measured step; entry 0 is its start."""

    first: int  # the step's first event, as a position among the trace's
    time_ns: IntColumn  # of each entry
    total: IntColumn

    @property
    def peak(self) -> int:
        """Return the entry with the largest total, the first of equals."""
        return int(np.argmax(self.total))


def run_total(trace: MemoryTrace, blocks: Blocks, classified: Classified) -> Running:
    """Add births and take deaths, event by event."""
    times = blocks.events.time_ns
    first = int(np.searchsorted(times, trace.start_ns))
    last = int(np.searchsorted(times, trace.end_ns))
    change = np.zeros(last - first + 1, np.int64)
    alive = classified.block
    size, born, died = blocks.bytes[alive], blocks.born[alive], blocks.died[alive]
    np.add.at(change, np.where(born < first, 0, born - first + 1), size)
    dies = died < last
    np.subtract.at(change, died[dies] - first + 1, size[dies])
    return Running(first, np.concatenate([[trace.start_ns], times[first:last]]), np.cumsum(change))


def alive_at(running: Running, blocks: Blocks, classified: Classified, entry: int) -> IntColumn:
    """Return the indices into ``classified`` of the blocks that make up ``running.total[entry]``."""
    position = running.first + entry  # events before this one have happened
    born, died = blocks.born[classified.block], blocks.died[classified.block]
    return np.flatnonzero((born < position) & (died >= position))


def rise_of_layers(trace: MemoryTrace, running: Running, layers: int) -> IntColumn:
    """For each layer the largest rise above what was allocated when a call, or one of its nodes, began."""
    table, assigned = trace.table, trace.assigned
    wanted = np.isin(table.kind, (RowKind.CALL, RowKind.NODE)) & (assigned.steps.of_row == 0)
    rows = np.flatnonzero(wanted & (assigned.rows.owner >= 0))
    first = np.searchsorted(running.time_ns, table.start_ns[rows], side="right") - 1
    last = np.searchsorted(running.time_ns, table.end_ns[rows], side="right")
    rise = np.zeros(layers, np.int64)
    for layer, low, high in zip(assigned.rows.owner[rows].tolist(), first.tolist(), last.tolist(), strict=True):
        if 0 <= low < high:
            rise[layer] = max(int(rise[layer]), int(running.total[low:high].max() - running.total[low]))
    return rise


SourceText = Mapping[tuple[str, int], tuple[str, str]]  # (file, line) -> (name to show, text of the line)


@dataclass(frozen=True, slots=True)
class MemoryInput:
    """The memory pass's trace and what was noted while it ran."""

    survey: SurveyInput  # trace, line spans, graphs and parameters, as of a survey
    device: str
    sightings: Sequence[Sighting]  # ``layer`` is the row of the layer table
    saved: Sequence[SavedTensor]
    lines: Sequence[LineInfo]
    census: Sequence[Mapping[int, int]] = ()  # storages of each size that were alive after each of some latest steps
    graphs: Mapping[int, CompiledGraph] = field(default_factory=dict)  # that Inductor compiled, by number of a run
    device_used: int | None = None  # CUDA: bytes in use on the device by everybody, and what there is
    device_reserved: int | None = None
    device_total: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Everything that is known of the step."""

    trace: MemoryTrace
    blocks: Blocks
    storages: Sequence[SavedStorage]
    found: Classified
    running: Running
    end_mark: int | None  # the moment after the step at which everything was noted
    lines: Sequence[LineInfo]
    modules: Sequence[ModuleInfo]
    source_text: SourceText
    census: Sequence[Mapping[int, int]]

    def path(self, layer: int) -> str | None:
        """Return the path of a layer; None for -1."""
        return self.modules[layer].path if layer >= 0 else None

    def place(self, line: int) -> str | None:
        """A source line as "file.py:12"; None for -1."""
        if line < 0:
            return None
        info = self.lines[line]
        return f"{self.source_text.get((info.file, info.line), (info.file, ''))[0]}:{info.line}"

    def allocated(self) -> tuple[IntColumn, IntColumn]:
        """Return the trace row and bytes of every allocation of the step."""
        events, first = self.blocks.events, self.running.first
        step = slice(first, first + len(self.running.total) - 1)
        given = events.bytes[step] > 0
        return events.row[step][given].astype(np.int64), events.bytes[step][given]


def read_step(given: MemoryInput, modules: Sequence[ModuleInfo], source_text: SourceText) -> MeasuredStep:
    """Read the memory pass; arguments as of :func:`gradscope.attribute.memory.result.read_memory`."""
    trace = read_places(given.survey)
    table = trace.table
    assert table.allocations is not None
    rows = np.flatnonzero(table.kind == RowKind.SEEN)
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    marks = list(zip(table.start_ns[rows].tolist(), table.argument[rows].tolist(), strict=True))
    events = events_of(table.allocations, given.device)
    compiled = read_compiled(trace.assigned, given.graphs, [info.path for info in modules])
    if compiled is not None:
        trace, events = at_kernels(trace, events, compiled)
    blocks = build_blocks(events, marks, _mark_at_start(trace, marks), given.sightings, given.saved)
    in_step = {number for time, number in marks if trace.start_ns <= time < trace.end_ns}
    storages = saved_storages(trace, blocks, given.saved, in_step)
    if compiled is not None:
        storages = [at_reader(each, compiled) for each in storages]
    found = classify(trace, blocks, storages, needed_until(trace, blocks, given.saved, in_step))
    return MeasuredStep(
        trace=trace,
        blocks=blocks,
        storages=storages,
        found=found,
        running=run_total(trace, blocks, found),
        end_mark=next((number for time, number in marks if time >= trace.end_ns), None),
        lines=given.lines,
        modules=modules,
        source_text=source_text,
        census=given.census,
    )


def _mark_at_start(trace: MemoryTrace, marks: Sequence[tuple[int, int]]) -> int:
    """The moment between the steps at which everything was noted: the last one before the marker of the step."""
    table = trace.table
    steps = np.flatnonzero((table.kind == RowKind.STEP) & (table.argument == 1))
    boundary = int(table.start_ns[steps[0]])
    return max((time, number) for time, number in marks if time <= boundary)[1]
