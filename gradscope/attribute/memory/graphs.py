"""What compiled code allocates and saves, by layer.

Inductor allocates what a kernel writes just before it runs the kernel: an allocation is of the layer that most of the
next kernel computes for. What one graph hands on to the graph of backward is saved by the layer whose backward reads
it, as without torch.compile: of several that which comes first in forward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradscope.attribute.compiled.fused import Share
from gradscope.attribute.compiled.read import CompiledTime
from gradscope.attribute.memory.classify import SavedStorage
from gradscope.attribute.memory.event_owners import MemoryTrace
from gradscope.attribute.nodes import nearest
from gradscope.attribute.rows import Category, Rows
from gradscope.tables import AllocationTable, RowKind


def at_kernels(
    trace: MemoryTrace, events: AllocationTable, compiled: CompiledTime
) -> tuple[MemoryTrace, AllocationTable]:
    """``trace`` with each kernel at the layer that most of it is of, ``events`` with allocations at their kernel."""
    assigned, kernel = trace.assigned, compiled.of_row
    inside = np.flatnonzero(kernel >= 0)
    owner, category, line = assigned.rows.owner.copy(), assigned.rows.category.copy(), assigned.line.copy()
    largest = [max(shares, key=lambda share: share.weight) for shares in compiled.kernels]
    for row in inside.tolist():
        share: Share = largest[kernel[row]]
        line[row] = share.line
        if share.layer is not None:
            owner[row] = share.layer
            if category[row] in {Category.UNATTRIBUTED, Category.OTHER}:
                category[row] = Category.LAYER if assigned.skeleton.in_backward[row] else Category.FORWARD
        if category[row] == Category.LAYER:
            category[row] = share.spent
    moved = replace(trace, assigned=replace(assigned, rows=Rows(category, owner), line=line))
    return moved, replace(events, row=_rows_of_kernels(trace, events, kernel))


def _rows_of_kernels(trace: MemoryTrace, events: AllocationTable, kernel: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """The row of each event; of what a graph's own code allocates that of the kernel which it runs next."""
    table = trace.table
    first = np.flatnonzero(kernel >= 0)  # with what a kernel runs itself, which begins behind it
    first = first[np.argsort(table.start_ns[first], kind="stable")]
    graph_of = nearest(table, first, (RowKind.GRAPH,))
    row = events.row.astype(np.int64)
    asked = np.flatnonzero((events.bytes > 0) & (row >= 0))
    asked = asked[kernel[row[asked]] < 0]
    graph = nearest(table, row[asked], (RowKind.GRAPH,))
    place = np.searchsorted(table.start_ns[first], events.time_ns[asked])
    known = np.flatnonzero((graph >= 0) & (place < len(first)))
    known = known[graph_of[place[known]] == graph[known]]
    row[asked[known]] = first[place[known]]
    return row.astype(events.row.dtype)


def at_reader(storage: SavedStorage, compiled: CompiledTime) -> SavedStorage:
    """``storage`` at the layer and line of the compiled code that reads it in backward, where one does."""
    run, place = storage.note.reader
    readers = compiled.readers.get((run, storage.layer, storage.note.sequence), ())
    if not 0 <= place < len(readers):
        return storage
    found = readers[place]
    return storage if found is None else replace(storage, layer=found[0], line=found[1])
