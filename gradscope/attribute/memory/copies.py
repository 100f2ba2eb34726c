"""Copies: memory that an op allocated only to hold what is already there in another layout or type."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradscope.attribute.memory.event_owners import MemoryTrace, phase_of
from gradscope.tables import IntColumn

# What these allocate is filled by a plain copy. contiguous, reshape, permute-then-view, matmul on strided operands and
# the gradient of a copied parameter all come down to clone; stack and hstack to cat; .half() and autocast to _to_copy.
COPYING = ("aten::clone", "aten::cat", "aten::_to_copy", "aten::repeat", "aten::_reshape_copy")
REPEAT = "aten::repeat"  # besides its result it allocates a few numbers, to index it with
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided")

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
    """Which of the allocations in ``rows`` an op of :data:`COPYING` made, itself or in what it called."""
    table = trace.table
    copying, repeat, empty = (
        np.array([name in wanted for name in table.names], bool) for wanted in (COPYING, (REPEAT,), _EMPTY)
    )
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
