"""Gives each row of a trace its step, category and owner, from the top of the tree down.

A full backward (pre-)hook of a module puts a node of its own around the call: the engine's row of that node is the
hook's work, and what it takes to call it. Hooks on tensors are marked while they run, see ``capture.backward``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradscope.attribute.nodes import (
    OUTSIDE,
    UNKNOWN,
    NodeLabels,
    NodeNumbers,
    above_lines,
    innermost_pass_around,
    label_nodes,
    nearest,
    number_nodes,
    outermost_passes,
    passes_around,
    span_labels,
)
from gradscope.attribute.sharding import owners_of_pieces, owners_of_wrapped
from gradscope.tables import EventTable, Int8Column, IntColumn, PassNote, RowKind, SpanTable

_NODE = "BackwardHookFunctionBackward"  # of torch.nn.modules._functions.BackwardHookFunction


class _Levels(Protocol):
    def propagate(self, marks: npt.NDArray[np.integer], root: int) -> npt.NDArray[np.integer]: ...


def is_module_hook(table: EventTable, rows: IntColumn) -> npt.NDArray[np.bool_]:
    """Return which of the NODE rows are of a module's full backward (pre-)hooks."""
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
    """Return which rows run inside a hook, at any depth, but for nested backward passes."""
    marks = np.full(len(table), inherit, np.int8)
    marks[table.kind == RowKind.BACKWARD] = 0
    nodes = np.flatnonzero(table.kind == RowKind.NODE)
    marks[nodes[is_module_hook(table, nodes)]] = 1
    marks[table.kind == RowKind.HOOK] = 1
    return levels.propagate(marks, 0).astype(bool)


BoolColumn = npt.NDArray[np.bool_]

OWN_ROWS = (RowKind.OWN, RowKind.PARAMETER)  # what gradscope does and marks in a step

INHERIT = -9  # in a column of marks: take the parent's value


class Category(IntEnum):
    """What a nanosecond was spent on."""

    OTHER = 0  # between the phases
    FORWARD = 1
    LAYER = 2  # backward nodes
    RECOMPUTE = 3
    GRADIENT_SUM = 4
    ACCUMULATE = 5
    HOOK = 6  # the user's backward hooks
    COMMUNICATION = 7
    ENGINE = 8
    UNATTRIBUTED = 9
    OPTIMIZER = 10


BACKWARD_CATEGORIES = tuple(category for category in Category if Category.LAYER <= category <= Category.UNATTRIBUTED)


class Levels:
    """The rows of a table by depth, to carry values from parents to children without a Python loop over rows."""

    def __init__(self, table: EventTable) -> None:
        self._parent = table.parent
        order = np.argsort(table.depth, kind="stable")
        counts = np.bincount(table.depth, minlength=1)
        self._levels = np.split(order, np.cumsum(counts)[:-1])

    def propagate(self, marks: npt.NDArray[np.integer], root: int) -> npt.NDArray[np.integer]:
        """A row has its own mark, or the value of its parent; a row without parent and mark has ``root``."""
        value = marks.copy()
        for depth, rows in enumerate(self._levels):
            inheriting = rows[value[rows] == INHERIT]
            value[inheriting] = root if depth == 0 else value[self._parent[inheriting]]
        return value


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The NODE and ACCUMULATE rows of a trace in order of start: the sequence in which the engine ran them."""

    row: IntColumn
    owner: IntColumn  # of a NODE; UNKNOWN for ACCUMULATE
    sequence: IntColumn  # of a NODE; -1 for ACCUMULATE, which has none


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What is known of a trace from itself alone, before the survey's notes are carried over."""

    table: EventTable
    levels: Levels
    in_backward: BoolColumn
    nodes: NodeRows
    numbers: NodeNumbers
    calls: SpanTable  # ``label`` is the index of the layer; -1 for none; -2 - k for ``outside[k]``
    parents: Sequence[int]  # of each layer its parent; OUTSIDE for a root
    sums: IntColumn  # ADD rows that stand directly in a NODE, behind the node's own function
    recomputed: IntColumn  # topmost rows of forward that a node ran again, outside of module calls
    outside: tuple[str, ...] = ()  # classes of modules that are called but are no layers
    paths: Sequence[str] = ()  # of each layer, where sharding is to be told by them


def read_skeleton(
    table: EventTable,
    calls: SpanTable,
    parents: Sequence[int],
    outside: tuple[str, ...] = (),
    paths: Sequence[str] = (),
) -> Skeleton:
    """Find the backward rows, the nodes and their owners, and what may be gradient sums.

    Args:
        calls: module calls; ``label`` is the index of the layer.
        parents: of each layer the index of its parent that is ever called; -1 for a root.
        outside: classes of the modules whose label is -2, -3, ...
        paths: of each layer its path, by which FSDP names what it works for.
    """
    levels = Levels(table)
    marks = np.full(len(table), INHERIT, np.int8)
    marks[np.isin(table.kind, (RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE))] = 1
    marks[table.kind == RowKind.OPTIMIZER] = 0
    marks[beside_nodes(table)] = 1
    in_backward = levels.propagate(marks, 0).astype(bool)
    numbers = number_nodes(table)
    owner = label_nodes(table, numbers, NodeLabels(table, calls, RowKind.CALL), RowKind.CALL, in_backward)
    owner = hooked_modules(table, numbers, calls, owner)
    accumulate = np.flatnonzero(table.kind == RowKind.ACCUMULATE)
    unknown = np.full(len(accumulate), UNKNOWN, np.int64)
    every = np.concatenate([numbers.row, accumulate])
    owners = np.concatenate([owner, unknown])
    sequences = np.concatenate([numbers.sequence, np.full(len(accumulate), -1, np.int64)])
    order = np.argsort(table.start_ns[every], kind="stable")
    nodes = NodeRows(every[order], owners[order], sequences[order])
    return Skeleton(
        table,
        levels,
        in_backward,
        nodes,
        numbers,
        calls,
        parents,
        _candidate_sums(table, numbers),
        _recomputed_rows(table, in_backward),
        outside,
        paths,
    )


def beside_nodes(table: EventTable) -> IntColumn:
    """Return the topmost rows on the engine's own threads that are no nodes: callbacks behind the last node of a pass.

    For tensors on a device the engine has threads of its own, on which DDP's reducer and FSDP end a pass.
    """
    nodes = np.flatnonzero(np.isin(table.kind, (RowKind.NODE, RowKind.ACCUMULATE)))
    loose = (
        nearest(table, table.parent[nodes].astype(np.int64), (RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)) < 0
    )
    others = np.unique(table.thread[np.isin(table.kind, (RowKind.STEP, RowKind.OPTIMIZER))])
    others = np.union1d(others, table.thread[outermost_passes(table)])
    engine = np.setdiff1d(table.thread[nodes[loose]], others)
    rows = np.flatnonzero((table.depth == 0) & np.isin(table.thread, engine))
    rows = rows[~np.isin(table.kind[rows], (RowKind.NODE, RowKind.ACCUMULATE))]
    found: IntColumn = rows[passes_around(table, rows) >= 0]
    return found


def _recomputed_rows(table: EventTable, in_backward: BoolColumn) -> IntColumn:
    """Return where forward is run again outside of every module call: the topmost row of each such stretch.

    These are the markers around the recompute of torch's own checkpointing, and ops that draw sequence numbers in a
    backward pass that builds no graph (the reentrant kind, and what is written by hand). ``Function.apply`` draws one
    also while gradients are off: it counts only beside an op or a nested backward that shows they were on.
    A pass with ``create_graph`` draws numbers everywhere; there such ops stay with their node.
    """
    marked = np.flatnonzero(table.kind == RowKind.RECOMPUTE)
    draws = (table.sequence >= 0) & (table.forward_thread == 0) & np.isin(table.kind, (RowKind.OP, RowKind.ADD))
    rows = np.flatnonzero(in_backward & (draws | (table.kind == RowKind.BACKWARD)) & (table.parent >= 0))
    if not len(rows):
        return marked
    above = above_lines(table, rows)
    inside = above >= 0
    rows, above = rows[inside], above[inside]
    grandparent = np.where(table.parent[above] >= 0, table.kind[table.parent[above]], RowKind.ANNOTATION)
    function = (table.kind[above] == RowKind.OP) & (grandparent == RowKind.NODE)
    function &= (table.sequence[above] >= 0) & (table.forward_thread[above] > 0)
    rows, above = rows[function], above[function]
    window = innermost_pass_around(table, above)
    plain = (window >= 0) & (table.argument[window] % 2 == 0)
    rows, above = rows[plain], above[plain]
    is_aten = np.array(["::" in name for name in table.names], bool)
    shows_gradients = (table.kind[rows] == RowKind.BACKWARD) | is_aten[table.name[rows]]
    believed = np.isin(above, above[shows_gradients]) & (table.kind[rows] != RowKind.BACKWARD)
    return np.sort(np.concatenate([marked, rows[believed]]))


def _candidate_sums(table: EventTable, numbers: NodeNumbers) -> IntColumn:
    """Return the ADD rows whose parent is a NODE and that started after the node's function had returned.

    The engine adds a gradient into the next node's buffer once the function is done; pre-hooks come before it.
    """
    rows = np.flatnonzero((table.kind == RowKind.ADD) & (table.parent >= 0))
    rows = rows[table.kind[table.parent[rows]] == RowKind.NODE]
    function_end = np.zeros(len(table), np.int64)
    known = numbers.function >= 0
    function_end[numbers.row[known]] = table.end_ns[numbers.function[known]]
    return rows[table.start_ns[rows] >= function_end[table.parent[rows]]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Category and owner of every row of a table."""

    category: Int8Column
    owner: IntColumn  # index of the layer; OUTSIDE


def assign_rows(skeleton: Skeleton, accumulate_owner: IntColumn, sum_rows: IntColumn, sum_owner: IntColumn) -> Rows:
    """Return the category and owner of each row.

    Args:
        accumulate_owner: owner of each row of ``skeleton.nodes`` that is an ACCUMULATE (others are ignored).
        sum_rows, sum_owner: the gradient sums among ``skeleton.sums`` and the layer each belongs to.
    """
    table, nodes = skeleton.table, skeleton.nodes
    category = np.full(len(table), INHERIT, np.int8)
    owner = np.full(len(table), INHERIT, np.int64)
    calls = np.flatnonzero(table.kind == RowKind.CALL)
    owner[calls] = span_labels(table, skeleton.calls, RowKind.CALL, calls)
    category[calls] = np.where(skeleton.in_backward[calls], Category.RECOMPUTE, Category.FORWARD)
    no_layers = calls[skeleton.calls.label[table.argument[calls]] < 0]
    category[no_layers[~skeleton.in_backward[no_layers]]] = INHERIT  # transforms and metrics: what runs around them
    windows = table.kind == RowKind.BACKWARD
    category[windows], owner[windows] = Category.ENGINE, OUTSIDE
    is_node = table.kind[nodes.row] == RowKind.NODE
    node_rows, node_owner = nodes.row[is_node], nodes.owner[is_node]
    category[node_rows] = np.where(node_owner == UNKNOWN, Category.UNATTRIBUTED, Category.LAYER)
    category[node_rows[is_module_hook(table, node_rows) & (node_owner != UNKNOWN)]] = Category.HOOK
    owner[node_rows] = np.where(node_owner == UNKNOWN, OUTSIDE, node_owner)
    accumulate = nodes.row[~is_node]
    category[accumulate], owner[accumulate] = Category.ACCUMULATE, accumulate_owner[~is_node]
    category[skeleton.recomputed] = Category.RECOMPUTE
    owner[skeleton.recomputed] = _recompute_owner(skeleton, node_rows, node_owner)
    category[sum_rows], owner[sum_rows] = Category.GRADIENT_SUM, sum_owner
    category[table.kind == RowKind.HOOK] = Category.HOOK
    within = calls[inside_hooks(table, skeleton.levels, INHERIT)[calls]]
    category[within], owner[within] = INHERIT, INHERIT
    own = np.isin(table.kind, OWN_ROWS)
    category[own], owner[own] = Category.OTHER, OUTSIDE
    beside = beside_nodes(table)
    reduces = any("reducer::" in name for name in table.names)  # among its rows are copies and views without a name
    category[beside], owner[beside] = Category.COMMUNICATION if reduces else Category.ENGINE, OUTSIDE
    optimizer = table.kind == RowKind.OPTIMIZER
    category[optimizer], owner[optimizer] = Category.OPTIMIZER, OUTSIDE
    category[_closure_rows(table)] = Category.FORWARD
    # A collective is its node's, as in tensor parallelism, or its parameter's.
    category[(table.kind == RowKind.COMMUNICATION) & skeleton.in_backward] = Category.COMMUNICATION
    sharding = np.flatnonzero(table.kind == RowKind.SHARDING)
    owner[sharding] = owners_of_pieces(table.names, skeleton.paths, INHERIT)[table.name[sharding]]
    sharding = sharding[skeleton.in_backward[sharding]]
    category[sharding] = Category.COMMUNICATION
    owner[sharding] = owners_of_wrapped(table, sharding, owner, skeleton.calls, skeleton.parents)
    return Rows(
        skeleton.levels.propagate(category, Category.OTHER).astype(np.int8),
        skeleton.levels.propagate(owner, OUTSIDE).astype(np.int64),
    )


def _closure_rows(table: EventTable) -> IntColumn:
    """Return the ops of a closure that an optimizer called, outside of every module: a functional loss.

    They draw sequence numbers, as an optimizer's own do only where it is differentiable: it shows a backward pass.
    """
    draws = (table.sequence >= 0) & (table.forward_thread == 0) & np.isin(table.kind, (RowKind.OP, RowKind.ADD))
    rows = np.flatnonzero(draws & (table.parent >= 0))
    around = (RowKind.OPTIMIZER, RowKind.CALL, RowKind.BACKWARD, RowKind.NODE)
    above = nearest(table, table.parent[rows].astype(np.int64), around)
    inside = above >= 0
    rows, above = rows[inside], above[inside]
    passes = np.flatnonzero((table.kind == RowKind.BACKWARD) & (table.parent >= 0))
    with_pass = nearest(table, table.parent[passes].astype(np.int64), around)
    return rows[(table.kind[above] == RowKind.OPTIMIZER) & np.isin(above, with_pass)]


def _recompute_owner(skeleton: Skeleton, node_rows: IntColumn, node_owner: IntColumn) -> IntColumn:
    """The layer whose function is run again: the caller of the modules called in the same recompute.

    That is their nearest common parent in the tree of paths. Where no module is called, it is the node's own layer.
    """
    table, parents = skeleton.table, skeleton.parents
    owner_of = dict(zip(node_rows.tolist(), node_owner.tolist(), strict=True))
    around = nearest(table, skeleton.recomputed, (RowKind.NODE,)).tolist()
    wanted = set(around)
    calls = np.flatnonzero((table.kind == RowKind.CALL) & skeleton.in_backward) if wanted else np.empty(0, np.int64)
    outer = nearest(table, table.parent[calls].astype(np.int64), (RowKind.NODE, RowKind.CALL))
    called: dict[int, set[int]] = {}
    for node, label in zip(outer.tolist(), skeleton.calls.label[table.argument[calls]].tolist(), strict=True):
        if node in wanted and label >= 0:
            called.setdefault(node, set()).add(int(label))
    found = []
    for node in around:
        own = max(owner_of.get(node, OUTSIDE), OUTSIDE)
        modules = called.get(node, set())
        callers = {parents[label] for label in modules}
        if modules and own >= 0:
            callers.add(own)
        found.append(_common_ancestor(callers, parents) if callers else own)
    return np.array(found, np.int64)


def _common_ancestor(labels: set[int], parents: Sequence[int]) -> int:
    chains = []
    for label in labels:
        chain = [label]
        while chain[-1] >= 0:
            chain.append(parents[chain[-1]])
        chains.append(chain)
    shared = set(chains[0]).intersection(*chains[1:])
    return next(label for label in chains[0] if label in shared)


@dataclass(frozen=True, slots=True)
class Steps:
    """The measured steps, in the order of time."""

    start_ns: IntColumn
    end_ns: IntColumn
    of_row: IntColumn  # number of the step, -1 outside of all

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def wall_ns(self) -> IntColumn:
        """Return how long each took."""
        return self.end_ns - self.start_ns


def outside_of(skeleton: Skeleton) -> IntColumn:
    """For each row the index in ``skeleton.outside`` of the module around it that is no layer; -1 for none."""
    table = skeleton.table
    marks = np.full(len(table), INHERIT, np.int64)
    calls = np.flatnonzero(table.kind == RowKind.CALL)
    label = skeleton.calls.label[table.argument[calls]]
    marks[calls] = np.where(label < OUTSIDE, -2 - label, OUTSIDE)
    return skeleton.levels.propagate(marks, OUTSIDE).astype(np.int64)


def reached_roots(table: EventTable, calls: SpanTable) -> set[int]:
    """Return the labels of the calls outside of every other call whose nodes a backward pass ran."""
    rows = np.flatnonzero(table.kind == RowKind.CALL)
    outer = nearest(table, table.parent[rows].astype(np.int64), (RowKind.CALL,))
    label = calls.label.copy()
    label[table.argument[rows[outer >= 0]]] = -1  # takes that of the call around it
    roots = SpanTable(label, calls.low, calls.high)
    numbers = number_nodes(table)
    found = NodeLabels(table, roots, RowKind.CALL).look_up(numbers.thread, numbers.sequence)
    return set(np.unique(found[found >= 0]).tolist())


def find_steps(skeleton: Skeleton, skip: int, *, at_markers: bool = False, left_out: Collection[int] = ()) -> Steps:
    """Cut the trace at its STEP markers, leaving out the first ``skip`` steps and those whose number is ``left_out``.

    A marker written by an optimizer's hook lies inside the optimizer's own row: the step ends where that row ends, or
    with ``at_markers`` at the marker, so that what gradscope does there itself is in no step.
    """
    table = skeleton.table
    markers = np.flatnonzero(table.kind == RowKind.STEP)
    markers = markers[np.argsort(table.argument[markers])]
    inside = nearest(table, markers, (RowKind.OPTIMIZER,))
    begun = table.start_ns[inside] < table.start_ns[markers]  # one that begins with the marker is of the next step
    inside = np.full(len(markers), -1) if at_markers else np.where(begun, inside, -1)
    bounds = np.where(inside >= 0, table.end_ns[inside], table.start_ns[markers])
    kept = np.array([number for number in range(skip, len(bounds) - 1) if number not in left_out], np.int64)
    place = np.full(max(len(bounds), 1), -1, np.int64)  # of each step among those that are kept
    place[kept] = np.arange(len(kept))
    marks = np.full(len(table), INHERIT, np.int64)
    # Below the user's own record_function around a whole loop each row is timed by itself.
    above = np.where(table.parent >= 0, table.kind[table.parent], RowKind.ANNOTATION)
    free = np.isin(above, (RowKind.ANNOTATION, RowKind.GRAPH))
    number = np.searchsorted(bounds, table.start_ns[free], side="right") - 1
    marks[free] = np.where(number >= 0, place[number], -1)  # what follows the last marker is in no step
    return Steps(bounds[kept], bounds[kept + 1], skeleton.levels.propagate(marks, -1).astype(np.int64))


def self_times(table: EventTable, start: IntColumn | None = None, end: IntColumn | None = None) -> IntColumn:
    """Return the duration of each row without its children, in ns; negative nowhere.

    Args:
        start, end: instead of the table's own times, ones on another scale (time while the device was idle).
    """
    start = table.start_ns if start is None else start
    end = table.end_ns if end is None else end
    duration = end - start
    children = np.zeros(len(table), np.int64)
    rows = np.flatnonzero(table.parent >= 0)
    np.add.at(children, table.parent[rows], duration[rows])
    own = duration - children
    return _without_other_threads(table, start, end, own)


def _without_other_threads(table: EventTable, start: IntColumn, end: IntColumn, own: IntColumn) -> IntColumn:
    """Take from a backward's own time what other threads evaluated meanwhile: it is counted there."""
    windows = outermost_passes(table)
    loose = np.flatnonzero(np.isin(table.kind, (RowKind.NODE, RowKind.ACCUMULATE)))
    around = (RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)
    loose = loose[nearest(table, table.parent[loose].astype(np.int64), around) < 0]
    loose = np.concatenate([loose, beside_nodes(table)])
    if not len(windows) or not len(loose):
        return own
    place = np.searchsorted(table.start_ns[windows], table.start_ns[loose], side="right") - 1
    inside = (place >= 0) & (table.start_ns[loose] < table.end_ns[windows[place]])
    loose, place = loose[inside], place[inside]
    order = np.argsort(start[loose], kind="stable")
    own = own.copy()
    covered_until: dict[int, int] = {}
    for row, window in zip(loose[order].tolist(), windows[place[order]].tolist(), strict=True):
        first = max(int(start[row]), covered_until.get(window, int(start[window])))
        last = min(int(end[row]), int(end[window]))
        if last > first:
            own[window] -= last - first
            covered_until[window] = last
    return np.maximum(own, 0)


def in_other_threads(skeleton: Skeleton, notes: Sequence[PassNote]) -> tuple[str, ...]:
    """Name which of "forward" and "backward" other threads ran: what they allocate torch's profiler does not record.

    It does record what the engine's own threads allocate for a pass of the thread that ends the steps.

    Args:
        notes: one for each backward pass, in the order in which they began.
    """
    table = skeleton.table
    trains = np.unique(table.thread[table.kind == RowKind.STEP])
    elsewhere = ~np.isin(table.thread, trains)
    calls = (table.kind == RowKind.CALL) & elsewhere & ~skeleton.in_backward
    layers = skeleton.calls.label[table.argument[calls]] >= 0
    windows = np.flatnonzero(table.kind == RowKind.BACKWARD)
    windows = windows[np.argsort(table.start_ns[windows], kind="stable")]
    nested = np.array([number < len(notes) and notes[number].nested for number in range(len(windows))], bool)
    found = {"forward": bool(layers.any()), "backward": bool(elsewhere[windows[~nested]].any())}
    return tuple(name for name, ran in found.items() if ran)
