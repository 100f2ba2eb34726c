"""What FSDP does in a trace: it writes a row around each piece of its work.

Those of ``fully_shard`` are ``record_function("FSDP::...")`` with the module that the piece is for: all-gathers, what
is copied before and behind them, reduce-scatters. They run in hooks on the tensors of other modules, in whose backward
nodes they lie. Those of the wrapping module, ``FullyShardedDataParallel._...``, are without it, and run in hooks on
nodes and parameters of what it wraps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gradscope import ops
from gradscope.attribute.nodes import nearest
from gradscope.tables import EventTable, IntColumn, RowKind, SpanTable

_PIECE = re.compile(r"FSDP::(\w+)(?: for)?(?: \(?([^()]*)\)?)?")


def piece_of(text: str) -> str:
    """``FSDP::all_gather`` of ``FSDP::all_gather (layers.0)``; other names stay."""
    found = _PIECE.fullmatch(text)
    return f"FSDP::{found[1]}" if found else text


def owners_of_pieces(names: Sequence[str], paths: Sequence[str], unknown: int) -> IntColumn:
    """The index of the layer that each name of a row is for; ``unknown`` where it names none.

    FSDP names a module below its root, and the root may lie somewhere in the model that is known. Of several modules
    that one collective is for the first counts.
    """
    index = {path: number for number, path in enumerate(paths)}
    found = np.full(len(names), unknown, np.int64)
    for number, text in enumerate(names):
        match = _PIECE.fullmatch(text)
        module = match[2].split(",")[0].strip() if match and match[2] else ""
        if not module:
            continue
        below = [path for path in paths if path.endswith("." + module)]
        if module in index:
            found[number] = index[module]
        elif len(below) == 1:
            found[number] = index[below[0]]
    return found


def owners_of_wrapped(
    table: EventTable, rows: IntColumn, owner: IntColumn, calls: SpanTable, parents: Sequence[int]
) -> IntColumn:
    """The owner of each of these rows; of the wrapping module's the one around the layer whose node they lie in.

    A wrapping module is one in whose forward such rows lie. What it gathers ahead, for others, is its own.

    Args:
        rows: in backward.
        owner: of each row of the table; known for nodes.
        calls: module calls; ``label`` is the index of the layer.
        parents: of each layer the index of its parent; negative for a root.
    """
    theirs = np.array([name.startswith(ops.WRAPPED) for name in table.names], bool)[table.name]
    around = nearest(table, np.flatnonzero(theirs), (RowKind.CALL, RowKind.NODE, RowKind.ACCUMULATE))
    around = around[around >= 0]
    around = around[table.kind[around] == RowKind.CALL]
    wrapping = set(np.unique(calls.label[table.argument[around]]).tolist())
    found = owner[rows]
    above = nearest(table, rows, (RowKind.NODE, RowKind.ACCUMULATE))
    for number in np.flatnonzero(theirs[rows] & (above >= 0)).tolist():
        layer = int(owner[above[number]])
        while layer >= 0 and layer not in wrapping:
            layer = parents[layer]
        if layer >= 0:
            found[number] = layer
    return found
