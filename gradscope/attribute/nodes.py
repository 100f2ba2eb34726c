"""Who made a backward node: the innermost span whose sequence numbers hold the node's.

Each autograd node draws a number from a counter of the thread that runs forward. A span (a module call, a source line)
knows the counter before and after it, so the spans of a thread cut its numbers into stretches with one label each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope.tables import EventTable, Int32Column, IntColumn, RowKind, SpanTable

OUTSIDE = -1  # made while no span was open
UNKNOWN = -2  # made before the trace began, or in a thread that the trace did not see


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Per thread: from number ``starts[i]`` up to the next start, nodes belong to ``labels[i]``."""

    starts: IntColumn
    labels: IntColumn


class NodeLabels:
    """Answers (thread, sequence number) -> label of the innermost span of one kind.

    With ``latest`` the label is that of the span which opened or closed last: behind a call it is still the call's.
    """

    def __init__(self, table: EventTable, spans: SpanTable, kind: RowKind, *, latest: bool = False) -> None:
        self._threads: dict[int, _Stretches] = {}
        self._latest = latest
        self._collect(table, spans, kind)

    def look_up(self, thread: Int32Column, sequence: IntColumn) -> IntColumn:
        """Return the label of each node; :data:`OUTSIDE` or :data:`UNKNOWN` where there is none."""
        found = np.full(len(sequence), UNKNOWN, np.int64)
        for number in np.unique(thread).tolist():
            stretches = self._threads.get(number)
            if stretches is None:
                continue
            rows = np.flatnonzero(thread == number)
            place = np.searchsorted(stretches.starts, sequence[rows], side="right") - 1
            found[rows] = np.where(place >= 0, stretches.labels[place], UNKNOWN)
        return found

    def _collect(self, table: EventTable, spans: SpanTable, kind: RowKind) -> None:
        rows = np.flatnonzero(table.kind == kind)
        span = table.argument[rows]
        label = span_labels(table, spans, kind, rows)
        outer = nearest(table, table.parent[rows].astype(np.int64), (kind,))
        outer_label = np.full(len(rows), OUTSIDE, np.int64)
        has_outer = outer >= 0
        position = np.searchsorted(rows, outer[has_outer])
        outer_label[has_outer] = label[position]
        if self._latest:
            outer_label = label
        thread = table.thread[rows]
        drew = np.flatnonzero((table.sequence >= 0) & (table.forward_thread == 0))
        drew_thread = table.thread[drew]
        for number in np.unique(np.concatenate([thread, drew_thread])).tolist():
            mine = thread == number
            # From the thread's first op or span on, numbers outside of every span are known to be outside.
            known_from = np.concatenate([table.sequence[drew[drew_thread == number][:1]], spans.low[span[mine]][:1]])
            time = np.concatenate([[np.iinfo(np.int64).min], table.start_ns[rows[mine]], table.end_ns[rows[mine]]])
            starts = np.concatenate([[known_from.min()], spans.low[span[mine]], spans.high[span[mine]]])
            labels = np.concatenate([[OUTSIDE], label[mine], outer_label[mine]])
            order = np.argsort(time, kind="stable")
            starts, labels = starts[order], labels[order]
            # An unclosed span can leave a smaller number behind a larger one; the counter itself never goes back.
            self._threads[number] = _Stretches(np.maximum.accumulate(starts), labels)


def span_labels(table: EventTable, spans: SpanTable, kind: RowKind, rows: IntColumn) -> IntColumn:
    """Return the label of each span row; a span without a name takes the label of the span around it."""
    label = spans.label[table.argument[rows]].copy()
    nameless = np.flatnonzero(label < 0)
    outer = nearest(table, table.parent[rows[nameless]].astype(np.int64), (kind,))
    place = np.searchsorted(rows, outer)
    for index, around, where in zip(nameless.tolist(), outer.tolist(), place.tolist(), strict=True):
        label[index] = label[where] if around >= 0 else OUTSIDE  # rows come in order: an outer one is settled
    return label


def above_lines(table: EventTable, rows: IntColumn) -> IntColumn:
    """Return the parent of each row, not counting the survey's own LINE markers; -1 for none."""
    above = table.parent[rows].astype(np.int64)
    inside = np.flatnonzero((above >= 0) & (table.kind[above] == RowKind.LINE))
    while len(inside):
        above[inside] = table.parent[above[inside]]
        inside = inside[(above[inside] >= 0) & (table.kind[above[inside]] == RowKind.LINE)]
    return above


def nearest(table: EventTable, start: IntColumn, kinds: tuple[RowKind, ...]) -> IntColumn:
    """From each row of ``start`` upwards (itself included), the first row of one of ``kinds``; -1 for none."""
    found = start.copy()
    wanted = np.zeros(max(RowKind) + 1, bool)
    wanted[list(kinds)] = True
    climbing = np.flatnonzero(found >= 0)
    while len(climbing):
        climbing = climbing[~wanted[table.kind[found[climbing]]]]
        found[climbing] = table.parent[found[climbing]]
        climbing = climbing[found[climbing] >= 0]
    return found


def outermost_passes(table: EventTable) -> IntColumn:
    """Return the rows of the backward passes that no other one is around, in the order in which they began.

    On the engine's own thread a nested one lies in a node, and its outer one in another thread.
    """
    windows = np.flatnonzero(table.kind == RowKind.BACKWARD)
    around = (RowKind.BACKWARD, RowKind.NODE, RowKind.ACCUMULATE)
    outer = nearest(table, table.parent[windows].astype(np.int64), around)
    windows = windows[outer < 0]
    return windows[np.argsort(table.start_ns[windows])]


def pass_of(table: EventTable, rows: IntColumn) -> IntColumn:
    """Return the number of the outermost backward pass that each row ran in; -1 before the first."""
    starts = table.start_ns[outermost_passes(table)]
    return (np.searchsorted(starts, table.start_ns[rows], side="right") - 1).astype(np.int64)


def passes_around(table: EventTable, rows: IntColumn) -> IntColumn:
    """Return the row of the outermost pass during which each of these rows began, on whatever thread; -1 for none."""
    windows = outermost_passes(table)
    if not len(windows):
        return np.full(len(rows), -1, np.int64)
    number = pass_of(table, rows)
    window = windows[np.maximum(number, 0)]
    return np.where((number >= 0) & (table.start_ns[rows] < table.end_ns[window]), window, -1)


def innermost_pass_around(table: EventTable, rows: IntColumn) -> IntColumn:
    """Return the row of the innermost pass that each of these rows ran in, on whatever thread; -1 for none."""
    inside = nearest(table, rows, (RowKind.BACKWARD,))
    return np.where(inside >= 0, inside, passes_around(table, rows))


def innermost_pass_of(table: EventTable, rows: IntColumn) -> IntColumn:
    """For each row the number of the backward pass that it ran in, of all in the order in which they began, or -1.

    On a thread of the engine's, where no pass is around it, it is of the outermost one that began last.
    """
    windows = np.flatnonzero(table.kind == RowKind.BACKWARD)
    windows = windows[np.argsort(table.start_ns[windows], kind="stable")]
    number = np.full(len(table) + 1, -1, np.int64)  # that of no row is the last
    number[windows] = np.arange(len(windows))
    last = number[np.append(outermost_passes(table), -1)][pass_of(table, rows)]
    around = nearest(table, rows, (RowKind.BACKWARD,))
    return np.where(around >= 0, number[around], last)


@dataclass(frozen=True, slots=True)
class NodeNumbers:
    """Every NODE row with the number and the forward thread of its node, and the row of the node's own function."""

    row: IntColumn
    sequence: IntColumn
    thread: Int32Column
    function: IntColumn  # -1 where the function left no row


def number_nodes(table: EventTable) -> NodeNumbers:
    """Find the numbers of all nodes.

    The engine's row carries none where a hook of the user runs an op before the function does; the function's row,
    the child of the same name, always does.
    """
    rows = np.flatnonzero(table.kind == RowKind.NODE)
    children = np.flatnonzero((table.kind == RowKind.OP) & (table.parent >= 0) & (table.forward_thread > 0))
    above = table.parent[children]
    same = (table.kind[above] == RowKind.NODE) & (table.name[children] == table.name[above])
    function_of = np.full(len(table), -1, np.int64)
    function_of[above[same]] = children[same]
    function = function_of[rows]
    missing = (table.sequence[rows] < 0) & (function >= 0)
    source = np.where(missing, function, rows)
    return NodeNumbers(rows, table.sequence[source], table.forward_thread[source], function)


def label_nodes(
    table: EventTable,
    nodes: NodeNumbers,
    labels: NodeLabels,
    kind: RowKind,
    in_backward: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> IntColumn:
    """Return the label of every node of ``nodes``.

    Nodes made while backward runs (``create_graph``) lie outside of every span: they inherit the label of the node
    that was being evaluated when they were made.
    """
    rows = nodes.row
    label = labels.look_up(nodes.thread, nodes.sequence)
    creator = _creators(table, kind, in_backward)
    if creator:
        place = {row: index for index, row in enumerate(rows.tolist())}
        keys = zip(nodes.thread.tolist(), nodes.sequence.tolist(), strict=True)
        made_by = [creator.get(key, -1) for key in keys]
        for index in np.argsort(table.start_ns[rows], kind="stable").tolist():
            if made_by[index] >= 0 and made_by[index] in place:
                label[index] = label[place[made_by[index]]]
    return label


def _creators(
    table: EventTable, kind: RowKind, in_backward: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> dict[tuple[int, int], int]:
    """(thread, number) -> the NODE row during which the node with that number was made, where there is one.

    An op's row carries the number that the next node will get, and ops that make no node leave it for the next op: the
    last op to start with a number is the one that used it.
    """
    rows = np.flatnonzero(in_backward & (table.sequence >= 0) & (table.forward_thread == 0))
    if not len(rows):
        return {}
    drew = np.flatnonzero((table.sequence >= 0) & (table.forward_thread == 0))
    last: dict[tuple[int, int], int] = {}
    touched = set(zip(table.thread[rows].tolist(), table.sequence[rows].tolist(), strict=True))
    for row, thread, number in zip(
        drew.tolist(), table.thread[drew].tolist(), table.sequence[drew].tolist(), strict=True
    ):
        if (thread, number) in touched:
            last[thread, number] = row  # rows of a thread come in order of start
    where = np.fromiter(last.values(), np.int64, len(last))
    around = nearest(table, where, (RowKind.NODE, RowKind.ACCUMULATE, kind))
    return {
        key: row for key, row in zip(last, around.tolist(), strict=True) if row >= 0 and table.kind[row] == RowKind.NODE
    }
