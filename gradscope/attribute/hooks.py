"""Finds the user's backward hooks in a trace.

A full backward (pre-)hook of a module puts a node of its own around the call: the engine's row of that node is the
hook's work, and what it takes to call it. Hooks on tensors are marked while they run, see ``capture.hooks``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradscope.attribute.nodes import NodeLabels, NodeNumbers
from gradscope.tables import EventTable, IntColumn, RowKind, SpanTable

_NODE = "BackwardHookFunctionBackward"  # of torch.nn.modules._functions.BackwardHookFunction


class _Levels(Protocol):
    def propagate(self, marks: npt.NDArray[np.integer], root: int) -> npt.NDArray[np.integer]: ...


def is_module_hook(table: EventTable, rows: IntColumn) -> npt.NDArray[np.bool_]:
    """Which of the NODE rows are of a module's full backward (pre-)hooks."""
    if _NODE not in table.names:
        return np.zeros(len(rows), bool)
    return np.asarray(table.name[rows] == table.names.index(_NODE))


def hooked_modules(table: EventTable, nodes: NodeNumbers, calls: SpanTable, owner: IntColumn) -> IntColumn:
    """``owner`` of the nodes, with those of hooks owned by the module that has the hook.

    The node around a call's inputs is made inside the call; the one around its outputs as soon as the call has
    returned, which is the caller's time: before any other call, for that puts its own node inside of itself.
    """
    mine = np.flatnonzero(is_module_hook(table, nodes.row))
    if not len(mine):
        return owner
    labels = NodeLabels(table, calls, RowKind.CALL, latest=True)
    found = labels.look_up(nodes.thread[mine], nodes.sequence[mine])
    owner = owner.copy()
    owner[mine] = found
    return owner


def inside_hooks(table: EventTable, levels: _Levels, inherit: int) -> npt.NDArray[np.bool_]:
    """Which rows run inside a hook, at any depth, but for nested backward passes."""
    marks = np.full(len(table), inherit, np.int8)
    marks[table.kind == RowKind.BACKWARD] = 0
    nodes = np.flatnonzero(table.kind == RowKind.NODE)
    marks[nodes[is_module_hook(table, nodes)]] = 1
    marks[table.kind == RowKind.HOOK] = 1
    return levels.propagate(marks, 0).astype(bool)
