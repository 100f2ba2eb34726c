"""What each block is and whose: from what was seen in it, what saved it, and where it was born and died."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.memory.blocks import NEVER, Blocks
from gradscope.attribute.memory.event_owners import NO_PLACE, MemoryTrace, enclosing_node_end
from gradscope.attribute.nodes import outermost_passes
from gradscope.attribute.rows import BACKWARD_CATEGORIES, Category
from gradscope.tables import CHECKPOINT, IntColumn, MemoryCategory, Role, RowKind, SavedTensor

_LASTING = {
    Role.PARAMETER: MemoryCategory.PARAMETER,
    Role.BUFFER: MemoryCategory.BUFFER,
    Role.GRADIENT: MemoryCategory.GRADIENT,
    Role.OPTIMIZER: MemoryCategory.OPTIMIZER,
}


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage saved for backward, under the node that was the first to keep it."""

    block: int  # NO_PLACE where it was not allocated by torch
    note: SavedTensor
    layer: int
    line: int


@dataclass(frozen=True, slots=True)
class Classified:
    """Category, owner and place of every block that was alive in the measured step."""

    block: IntColumn  # rows of Blocks, in order of birth
    category: list[MemoryCategory]
    layer: IntColumn
    line: IntColumn
    op: list[str]
    leaf: list[str]
    row: IntColumn  # trace row that allocated it; -1
    saved_until: IntColumn  # time at which the last node that kept it had run; NEVER; smallest number if never saved


def classify(
    trace: MemoryTrace, blocks: Blocks, storages: Sequence[SavedStorage], last_needed: IntColumn
) -> Classified:
    """Classify the blocks that were alive at some moment of the measured step.

    Args:
        storages: what was saved, each storage once.
        last_needed: of each block the end of the last node that kept it; see :func:`needed_until`.
    """
    born_ns, died_ns = blocks.times(blocks.born), blocks.times(blocks.died)
    alive = np.flatnonzero((born_ns < trace.end_ns) & (died_ns > trace.start_ns))
    row, free_row = blocks.rows(blocks.born[alive]), blocks.rows(blocks.died[alive])
    born_ns, died_ns = born_ns[alive], died_ns[alive]
    born_in = trace.category(row)
    layer, line = trace.owner(row), trace.line(row)
    by_block = {storage.block: storage for storage in storages if storage.block >= 0}
    next_backward = _next_backward(trace, born_ns)
    first_call = _first_call(trace)
    node_end = enclosing_node_end(trace.table, row)
    free_in = trace.category(free_row)
    categories: list[MemoryCategory] = []
    for index, block in enumerate(alive.tolist()):
        seen = blocks.seen[block]
        lasting = min((entry for entry in seen if entry.role in _LASTING), key=lambda entry: entry.role, default=None)
        kind = int(born_in[index])
        before = blocks.born[block] < 0
        if lasting is not None:
            category = _LASTING[lasting.role]
            if lasting.layer >= 0:
                layer[index] = lasting.layer
            elif category is not MemoryCategory.GRADIENT:
                layer[index] = NO_PLACE
        elif _is_input(seen, before, kind, int(born_ns[index]), int(died_ns[index]), first_call, block in by_block):
            category, layer[index] = MemoryCategory.INPUT, NO_PLACE
        elif block in by_block:
            category = MemoryCategory.SAVED
            layer[index], line[index] = by_block[block].layer, by_block[block].line
        elif before:
            category = MemoryCategory.OTHER
        elif kind == Category.RECOMPUTE:
            again = free_in[index] == Category.RECOMPUTE and died_ns[index] != NEVER
            category = MemoryCategory.TEMPORARY if again else MemoryCategory.SAVED
        elif kind in BACKWARD_CATEGORIES:
            gone = died_ns[index] <= node_end[index]
            category = MemoryCategory.TEMPORARY if gone else MemoryCategory.ACTIVATION_GRADIENT
        elif kind == Category.OPTIMIZER:
            category = MemoryCategory.TEMPORARY
        else:
            gone = died_ns[index] < next_backward[index]
            category = MemoryCategory.TEMPORARY if gone else MemoryCategory.ACTIVATION
        categories.append(category)
    return Classified(
        block=alive,
        category=categories,
        layer=layer,
        line=line,
        op=trace.op(row),
        leaf=trace.leaf(row),
        row=row,
        saved_until=last_needed[alive],
    )


def _is_input(
    seen: Sequence[object],
    before: bool,
    kind: int,
    born_ns: int,
    died_ns: int,
    first_call: int,
    saved: bool,
) -> bool:
    """The batch: given to a model, or made before the step's first module call and still there at it."""
    if before:
        # Neither the model's nor made in a step, but a node needs it: data from outside.
        return saved or any(getattr(entry, "role", None) == Role.INPUT for entry in seen)
    if kind != Category.OTHER:
        return False
    return any(getattr(entry, "role", None) == Role.INPUT for entry in seen) or born_ns < first_call < died_ns


def saved_storages(
    trace: MemoryTrace, blocks: Blocks, saved: Sequence[SavedTensor], marks: set[int]
) -> list[SavedStorage]:
    """Return what the measured step's graphs held, each storage once, under the node with the smallest number.

    Args:
        marks: the moments that lie in the measured step.
    """
    wanted = [index for index, note in enumerate(saved) if note.mark in marks]
    layer, line = trace.made_by([saved[index].sequence for index in wanted])
    owners = trace.recompute_owners()
    for place, index in enumerate(wanted):
        if saved[index].node == CHECKPOINT:
            layer[place] = owners.get(saved[index].sequence, layer[place])
            line[place] = NO_PLACE
    found: dict[tuple[int, int], SavedStorage] = {}
    entries = zip(wanted, layer.tolist(), line.tolist(), strict=True)
    for index, note_layer, note_line in sorted(entries, key=lambda entry: saved[entry[0]].sequence):
        note, block = saved[index], blocks.of_saved[index]
        key = (block, 0) if block >= 0 else (block, note.pointer)
        if key not in found:
            found[key] = SavedStorage(block, note, note_layer, note_line)
    return list(found.values())


def needed_until(trace: MemoryTrace, blocks: Blocks, saved: Sequence[SavedTensor], marks: set[int]) -> IntColumn:
    """Of each block the time at which the last node that keeps it has run; NEVER if one never ran.

    A block that nobody saved has the smallest number.
    """
    until = np.full(len(blocks.bytes), np.iinfo(np.int64).min)
    ended = trace.last_run()
    for index, note in enumerate(saved):
        block = blocks.of_saved[index]
        if block >= 0 and note.mark in marks:
            # What recompute saves shares the checkpoint's inputs: they are needed for as long as they live.
            end = NEVER if note.node == CHECKPOINT else ended.get(note.sequence, NEVER)
            until[block] = max(int(until[block]), end)
    return until


def _next_backward(trace: MemoryTrace, born_ns: IntColumn) -> IntColumn:
    """Start of the first outermost backward pass after each birth; NEVER if there is none in the trace."""
    starts = np.append(backward_windows(trace)[0], NEVER)
    return starts[np.searchsorted(starts[:-1], born_ns, side="right")]


def backward_windows(trace: MemoryTrace) -> tuple[IntColumn, IntColumn]:
    """Return the starts and ends of the outermost backward passes of the trace."""
    table, windows = trace.table, outermost_passes(trace.table)
    return table.start_ns[windows], table.end_ns[windows]


def _first_call(trace: MemoryTrace) -> int:
    """Start of the measured step's first module call; of its first operation where no module is called."""
    table, rows = trace.table, trace.assigned.rows
    forward = (rows.category == Category.FORWARD) & (trace.assigned.steps.of_row == 0)
    calls = table.start_ns[forward & (table.kind == RowKind.CALL)]
    starts = calls if len(calls) else table.start_ns[forward]
    return int(starts.min()) if len(starts) else NEVER
