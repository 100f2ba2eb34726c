"""What was alive at the moments that matter, and what grows from step to step.

A step that leaves something behind is no leak yet. A loader that looks ahead leaves the next batch, a window of the
last outputs its newest one, and both have let go of an older one of that size: their number stays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from gradscope.attribute.cost_table import PYTHON
from gradscope.attribute.memory.blocks import Blocks
from gradscope.attribute.memory.classify import backward_windows
from gradscope.attribute.memory.event_owners import phase_of
from gradscope.attribute.memory.step import MeasuredStep, alive_at
from gradscope.tables import HeldRow, HolderRow, MemoryCategory, RetainedRow, Role, SavedRow

FEWEST_STEPS = 3  # in each of which it must grow

Key = TypeVar("Key", bound=Hashable)


class Growth:
    """By how much the storages of each size, and all of them, became more in every one of the steps.

    Args:
        census: storages of each size that were alive after each step; no growth is told from fewer than
            FEWEST_STEPS + 1 of them.
    """

    def __init__(self, census: Sequence[Mapping[int, int]]) -> None:
        self._census = census if len(census) > FEWEST_STEPS else ()
        self._whole = self._steady([sum(counts.values()) for counts in self._census])

    def of(self, left: Mapping[Key, Sequence[int]]) -> set[Key]:
        """Return which of the groups of storages that the last step left behind it leaves behind in every step.

        A group whose sizes each become more by as many as it has grows. One whose sizes differ from step to step does
        where the number of all storages becomes more by as many beyond that.
        """
        growing, rest = set(), self._whole
        for key, sizes in left.items():
            if all(self._of_size(size) >= count for size, count in Counter(sizes).items()):
                growing.add(key)
                rest -= len(sizes)
        return growing | {key for key, sizes in left.items() if key not in growing and self._varies(sizes, rest)}

    def _varies(self, sizes: Sequence[int], rest: int) -> bool:
        """Check that a step before left none of these sizes, and that ``rest`` more storages account for them."""
        new = len(self._census) > 0 and all(not self._census[0].get(size) for size in sizes)
        return new and rest >= len(sizes)

    def _of_size(self, size: int) -> int:
        return self._steady([counts.get(size, 0) for counts in self._census])

    def _steady(self, counts: Sequence[int]) -> int:
        return min((later - earlier for earlier, later in pairwise(counts)), default=0)


_MODEL = {Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER}


def holders_at(step: MeasuredStep, entry: int) -> tuple[HolderRow, ...]:
    """The live set at one entry of the running total, by owner and category, largest first."""
    found, time = step.found, int(step.running.time_ns[entry])
    held: dict[tuple[int, MemoryCategory], int] = defaultdict(int)
    for index in alive_at(step.running, step.blocks, found, entry).tolist():
        category = found.category[index]
        if category is MemoryCategory.SAVED and _released(int(found.saved_until[index]), time):
            category = MemoryCategory.ACTIVATION  # every node that kept it has run: somebody else holds it
        held[int(found.layer[index]), category] += int(step.blocks.bytes[found.block[index]])
    rows = [HolderRow(step.path(layer), category.value, size) for (layer, category), size in held.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.owner or "", row.category)))


def saved_rows(step: MeasuredStep) -> tuple[SavedRow, ...]:
    """Return what the step's graphs kept, equal tensors of one line together, largest first."""
    groups: dict[tuple[int, int, str, str, str, str], list[int]] = defaultdict(list)
    at_peak: dict[tuple[int, int, str, str, str, str], int] = defaultdict(int)
    waiting = _saved_at(step, step.running.peak)
    for storage in step.storages:
        note = storage.note
        key = (storage.layer, storage.line, note.node, note.what, note.shape, note.dtype)
        groups[key].append(note.bytes)
        at_peak[key] += note.bytes if storage.block in waiting else 0
    rows = [
        SavedRow(step.path(key[0]), step.place(key[1]), *key[2:], len(sizes), sum(sizes), at_peak[key])
        for key, sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _saved_at(step: MeasuredStep, entry: int) -> set[int]:
    """The blocks that wait for a backward node then; those of the batch, which stay in any case, are none."""
    found, time = step.found, int(step.running.time_ns[entry])
    return {
        int(found.block[index])
        for index in alive_at(step.running, step.blocks, found, entry).tolist()
        if found.category[index] is MemoryCategory.SAVED and not _released(int(found.saved_until[index]), time)
    }


def backward_passes(step: MeasuredStep) -> list[int]:
    """Return when each of the step's outermost backward passes began."""
    trace = step.trace
    return [start for start in backward_windows(trace)[0].tolist() if trace.start_ns <= start < trace.end_ns]


def _held_blocks(step: MeasuredStep) -> list[int]:
    """Indices into ``step.found`` of other activations that were alive when a backward pass of the step began."""
    found, blocks = step.found, set[int]()
    for start in backward_passes(step):
        entry = int(np.searchsorted(step.running.time_ns, start, side="right")) - 1
        blocks |= set(alive_at(step.running, step.blocks, found, entry).tolist())
    return [index for index in sorted(blocks) if found.category[index] is MemoryCategory.ACTIVATION]


def held_at_peak(step: MeasuredStep) -> int:
    """Return the bytes of what :func:`held_rows` counts that are alive at the peak."""
    alive = set(alive_at(step.running, step.blocks, step.found, step.running.peak).tolist())
    return sum(int(step.blocks.bytes[step.found.block[index]]) for index in _held_blocks(step) if index in alive)


def held_rows(step: MeasuredStep) -> tuple[HeldRow, ...]:
    """List other activations that were alive when a backward pass of the step began, each block once."""
    found = step.found
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for index in _held_blocks(step):
        key = (int(found.layer[index]), int(found.line[index]), found.op[index] or PYTHON)
        groups[key].append(int(step.blocks.bytes[found.block[index]]))
    rows = [
        HeldRow(step.path(layer), step.place(line), op, len(sizes), sum(sizes))
        for (layer, line, op), sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def retained_rows(step: MeasuredStep) -> tuple[RetainedRow, ...]:
    """Return what the step left behind, and whether the step before left the same behind and it is there still.

    The counts after each of some steps say what grows, see :class:`Growth`.
    """
    found, trace = step.found, step.trace
    last = step.running.first + len(step.running.total) - 1
    groups: dict[tuple[int, int, str, str], list[int]] = defaultdict(list)
    older: set[tuple[int, int, str]] = set()  # no phase: only in the measured step is it known when forward begins
    category_of = trace.category(found.row)
    for index, block in enumerate(found.block.tolist()):
        if step.blocks.died[block] < last or step.blocks.born[block] < 0:
            continue
        if _is_models(step, block):
            continue
        phase = phase_of(int(category_of[index]))
        owner = trace.owner(found.row[index : index + 1])
        line = trace.line(found.row[index : index + 1])
        key = (int(owner[0]), int(line[0]), found.op[index] or PYTHON, phase)
        if step.blocks.born[block] < step.running.first:
            older.add(key[:3])
        elif found.category[index] is not MemoryCategory.INPUT or not _still_given(step.blocks, block):
            groups[key].append(int(step.blocks.bytes[block]))
    growth = Growth(step.census)
    again = {key: sizes for key, sizes in groups.items() if key[:3] in older}
    growing = growth.of(again)
    rows = []
    for (layer, at, op, phase), sizes in groups.items():
        grows = (layer, at, op, phase) in growing
        rows.append(RetainedRow(step.path(layer), step.place(at), op, phase, len(sizes), sum(sizes), grows))
    return tuple(sorted(rows, key=lambda row: (not row.grows, -row.bytes)))


def _is_models(step: MeasuredStep, block: int) -> bool:
    """Check that the block was the model's or an optimizer's when the step had ended, not just once."""
    return any(entry.mark == step.end_mark and entry.role in _MODEL for entry in step.blocks.seen[block])


def _released(until: int, time: int) -> bool:
    return np.iinfo(np.int64).min < until < time


def _still_given(blocks: Blocks, block: int) -> bool:
    """Check that the block is the batch of the step, which the loop that made it holds by right."""
    return any(entry.role == Role.INPUT for entry in blocks.seen[block])
