"""Finds the same block of memory in runs at several batch sizes, by what allocated it and when.

The runs do the same operations, so the n-th block that one operation of one layer allocates in one run is its n-th in
the others. Where the number of such blocks differs (an operation that needs a workspace from some size on), they are
matched between neighbours that are sure; what is left over becomes a *remainder*: bytes at each moment of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.tables import BlockTable, IntColumn


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The memory of one step at one batch size."""

    batch_size: int
    blocks: BlockTable
    layers: tuple[str, ...]  # path of each layer that the blocks name

    @property
    def peak_bytes(self) -> int:
        """The largest running total."""
        return int(running_total(self.blocks.events, self.blocks.born, self.blocks.died, self.blocks.bytes).max())


@dataclass(frozen=True, slots=True)
class Alignment:
    """Runs at several batch sizes on the clock of the largest one, the reference.

    Moment ``t`` of the clock is after ``t`` of the reference's allocator events: ``events + 1`` moments.
    """

    batch_sizes: tuple[int, ...]  # ascending; the last is the reference's
    reference: BatchRun
    rows: IntColumn  # of the reference's blocks that every run has
    bytes: IntColumn  # of these, shape (rows, batch sizes)
    remainder: IntColumn  # bytes of all other blocks, shape (batch sizes, moments)


def align(runs: Sequence[BatchRun]) -> Alignment:
    """Match the blocks of ``runs``, given in ascending order of batch size."""
    reference = runs[-1]
    count = len(reference.blocks.bytes)
    partners = [_match(run, reference) for run in runs[:-1]]
    common = np.ones(count, np.bool_)
    for partner in partners:
        common &= partner >= 0
    rows = np.flatnonzero(common)
    columns = [run.blocks.bytes[partner[rows]] for run, partner in zip(runs, partners, strict=False)]
    remainder = [_remainder(run, reference, rows, partner[rows]) for run, partner in zip(runs, partners, strict=False)]
    remainder.append(_remainder(reference, reference, rows, rows))
    return Alignment(
        batch_sizes=tuple(run.batch_size for run in runs),
        reference=reference,
        rows=rows,
        bytes=np.stack([*columns, reference.blocks.bytes[rows]], axis=1),
        remainder=np.stack(remainder),
    )


def running_total(events: int, born: IntColumn, died: IntColumn, sizes: IntColumn) -> IntColumn:
    """Bytes alive at each of the ``events + 1`` moments; see :class:`~gradscope.tables.BlockTable` for the columns."""
    change = np.zeros(events + 2, np.int64)
    np.add.at(change, born + 1, sizes)
    np.subtract.at(change, died + 1, sizes)
    return np.cumsum(change)[:-1]


# --------------------------------------------------------------------------------------------------------------------
# Matching
# --------------------------------------------------------------------------------------------------------------------


def _match(run: BatchRun, reference: BatchRun) -> IntColumn:
    """Row of ``run`` for each block of the reference; -1 where it has no such block."""
    partner = np.full(len(reference.blocks.bytes), -1, np.int64)
    _pair(_groups(_resident(run)), _groups(_resident(reference)), partner)
    here, there = list(_made(run)), list(_made(reference))
    _pair(_groups(here), _groups(there), partner)
    # The others between neighbours that are sure: the n-th of its kind since the last block that was matched.
    matched = np.flatnonzero(partner >= 0).tolist()
    mine = {int(partner[row]): row for row in matched}
    _pair(_groups(_since_anchor(here, mine)), _groups(_since_anchor(there, {row: row for row in matched})), partner)
    return partner


_Keyed = tuple[Hashable, int]  # what a block is, and its row


def _resident(run: BatchRun) -> list[_Keyed]:
    """Blocks from before the step, which come in no order: by size, for sums do not ask which is which."""
    blocks = run.blocks
    rows = np.flatnonzero(blocks.born < 0)
    ordered = sorted(rows.tolist(), key=lambda row: (blocks.bytes[row], blocks.died[row]))
    return [((blocks.category[row], _layer(run, row), bool(blocks.died[row] == blocks.events)), row) for row in ordered]


def _made(run: BatchRun) -> Iterator[_Keyed]:
    """Blocks that the step allocated, in their order."""
    blocks = run.blocks
    for row in np.flatnonzero(blocks.born >= 0).tolist():
        yield (_layer(run, row), blocks.op[row], blocks.leaf[row]), row


def _layer(run: BatchRun, row: int) -> str | None:
    number = int(run.blocks.layer[row])
    return run.layers[number] if number >= 0 else None


def _since_anchor(keyed: Sequence[_Keyed], matched: Mapping[int, int]) -> Iterator[_Keyed]:
    """Unmatched blocks, their keys with the reference's row of the last matched block before them."""
    anchor = -1
    for key, row in keyed:
        if row in matched:
            anchor = matched[row]
        else:
            yield (key, anchor), row


def _groups(keyed: Sequence[_Keyed] | Iterator[_Keyed]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for key, row in keyed:
        groups[key].append(row)
    return groups


def _pair(here: dict[Hashable, list[int]], there: dict[Hashable, list[int]], partner: IntColumn) -> None:
    """Match the n-th with the n-th of each kind of which both have as many and none is matched yet."""
    for key, rows in there.items():
        mine = here.get(key, ())
        if len(mine) == len(rows):
            partner[rows] = mine


# --------------------------------------------------------------------------------------------------------------------
# What could not be matched
# --------------------------------------------------------------------------------------------------------------------


def _remainder(run: BatchRun, reference: BatchRun, rows: IntColumn, own: IntColumn) -> IntColumn:
    """Most bytes of the run's other blocks at each moment of the reference's clock.

    Args:
        rows: of the reference, matched.
        own: the run's rows of the same blocks.
    """
    blocks, clock = run.blocks, reference.blocks
    others = np.ones(len(blocks.bytes), np.bool_)
    others[own] = False
    total = running_total(blocks.events, blocks.born[others], blocks.died[others], blocks.bytes[others])
    moment = np.zeros(blocks.events + 1, np.int64)
    for mine, theirs in ((blocks.born, clock.born), (blocks.died, clock.died)):
        inside = (mine[own] >= 0) & (mine[own] < blocks.events) & (theirs[rows] < clock.events)
        np.maximum.at(moment, mine[own][inside] + 1, theirs[rows][inside] + 1)
    moment = np.maximum.accumulate(moment)
    most = np.full(clock.events + 1, -1, np.int64)
    np.maximum.at(most, moment, total)
    # A moment at which this run did nothing that it shares: as at its last one before.
    last = np.zeros(clock.events + 1, np.int64)
    np.maximum.at(last, moment, np.arange(len(moment)))
    last = np.maximum.accumulate(last)
    return np.where(most >= 0, most, total[last])
