"""Raw profiler events -> :class:`~gradscope.tables.EventTable`. The only reader of what torch.profiler recorded.

Two interfaces give the same events: trees, which need little memory, and a list, which has everything and is needed
for devices, shapes, and forward passes on several threads. Nesting is found by sorting, not by a stack in Python, so
that a million events stay a matter of seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradscope import markers
from gradscope.compat import kineto_events, kineto_tree
from gradscope.tables import EventTable, Int32Column, IntColumn, KernelTable, RowKind
from gradscope.trace.names import USER_SCOPE, classify_names
from gradscope.trace.tree import BELOW_AUTOGRAD, Interner, RawColumns, nest, no_garbage_collection, read_tree

# CUDA runtime and driver calls are CPU rows that duplicate what the op rows around them already time; their thread
# number is the operating system's, so they would nest nowhere.
_RUNTIME_PREFIXES = ("cuda", "cu", "hip", "Activity Buffer")


def split_devices(events: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(host, device)``: rows of torch's own threads, and activities on a device. Runtime calls are dropped."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    host, device = [], []
    for event in events:
        if event.device_type() != DeviceType.CPU:
            # A record_function is mirrored on the device as one long bar over its kernels: not work of its own.
            if not event.is_user_annotation():
                device.append(event)
        elif not _is_runtime(event.name()):
            host.append(event)
    return host, device


def _is_runtime(name: str) -> bool:
    return name.startswith(_RUNTIME_PREFIXES) and "::" not in name and " " not in name.removeprefix("Activity ")


def read_kernels(events: Sequence[Any], correlation: IntColumn) -> KernelTable:
    """Kernels, copies and memsets in order of start, each with the row that launched it.

    Args:
        correlation: of each row on the host, in the order of the :class:`~gradscope.tables.EventTable`.
    """
    names: dict[str, int] = {}
    order = sorted(events, key=lambda event: event.start_ns())

    def column(values: list[int]) -> Any:
        return np.array(values, np.int64)

    start = column([event.start_ns() for event in order])
    return KernelTable(
        name=column([names.setdefault(event.name(), len(names)) for event in order]),
        names=tuple(names),
        start_ns=start,
        end_ns=start + column([event.duration_ns() for event in order]),
        device=column([event.device_index() for event in order]),
        stream=column([event.device_resource_id() for event in order]),
        row=launchers(correlation, column([event.linked_correlation_id() for event in order])),
    )


def launchers(of_rows: IntColumn, of_kernels: IntColumn) -> IntColumn:
    """The row that launched each kernel, by its correlation; -1 where there is none."""
    if not len(of_rows):
        return np.full(len(of_kernels), -1, np.int64)
    order = np.argsort(of_rows, kind="stable")
    known = of_rows[order]
    place = np.minimum(np.searchsorted(known, of_kernels), len(known) - 1)
    return np.where(known[place] == of_kernels, order[place], -1)


def read_trace(
    profiler: Any, *, device: bool = False, shapes: bool = False, whole: bool = False, calls: bool = True
) -> EventTable:
    """Read all events of a stopped profiler.

    Args:
        profiler: a ``torch.profiler.profile``; it keeps its own copy of the events until it is dropped.
        device: the trace may hold device activities (CUDA).
        shapes: read the input shapes of each row, and all rows.
        whole: read what aten ops call too: the survey's markers lie inside of ops.
        calls: False where module calls were not all noted: their rows hold nothing then, for some have no end.
    """
    with no_garbage_collection():
        if not device and not shapes:
            found = _from_tree(profiler, whole=whole, calls=calls)
            if found is not None:
                return found
        return _from_list(kineto_events(profiler), device=device, shapes=shapes, whole=whole, calls=calls)


def _from_tree(profiler: Any, *, whole: bool = False, calls: bool = True) -> EventTable | None:
    below = whole or _communicates_below_autograd()
    read = read_tree(kineto_tree(profiler), whole=below)
    if read is None:
        return None
    table = make_table(*read, calls=calls)
    return table if whole or not below else without_parts_of_ops(table)


def _communicates_below_autograd() -> bool:
    """Check that operations on tensors that lie on several ranks may wait for these: DTensor's dispatch."""
    group = torch.distributed
    several = os.environ.get("WORLD_SIZE", "1") != "1" or (group.is_available() and group.is_initialized())
    return several and "torch.distributed.tensor" in sys.modules


def _from_list(events: list[Any], *, device: bool, shapes: bool, whole: bool = False, calls: bool = True) -> EventTable:
    host, device_events = split_devices(events) if device else (events, [])
    names = Interner()
    name = _column(host, "name", names.__getitem__).astype(np.int32)
    first = np.empty(len(names), np.int64)
    first[name[::-1]] = np.arange(len(host))[::-1]  # of equal names the smallest row is written last
    scopes = [int(host[row].scope()) for row in first.tolist()]
    start = _column(host, "start_ns")
    columns = RawColumns(
        name=name,
        start_ns=start,
        end_ns=start + _column(host, "duration_ns"),
        thread=_column(host, "start_thread_id").astype(np.int32),
        sequence=_column(host, "sequence_nr"),
        forward_thread=_column(host, "fwd_thread_id").astype(np.int32),
        correlation=_column(host, "correlation_id") if device else None,
        shapes=_shape_texts(host) if shapes else None,
    )
    table = make_table(columns, names, scopes, calls=calls)
    if columns.correlation is not None:
        table = replace(table, kernels=read_kernels(device_events, columns.correlation[row_order(columns)]))
        device_events.clear()
    host.clear()
    events.clear()  # some 350 bytes each: given back before the analysis needs memory
    return table if whole or shapes else without_parts_of_ops(table)


def without_parts_of_ops(table: EventTable) -> EventTable:
    """Leave out what the tree reader does not read, so that a report does not depend on which reader it came from.

    What a part of an op launched counts as launched by the op.
    """
    return without_rows(table, parts_of_ops(table))


def parts_of_ops(table: EventTable) -> npt.NDArray[np.bool_]:
    """Return which rows an op made below autograd, but for marks of steps and for what waits for other ranks."""
    below = np.array([name.startswith(BELOW_AUTOGRAD) for name in table.names], bool)
    closed = below[table.name] & (table.sequence < 0)
    drop = np.zeros(len(table), bool)
    for level in range(1, int(table.depth.max(initial=0)) + 1):
        rows = np.flatnonzero(table.depth == level)
        above = table.parent[rows]
        drop[rows] = drop[above] | closed[above]
    return drop & ~np.isin(table.kind, (RowKind.STEP, RowKind.COMMUNICATION))


def sums_of_kept(table: EventTable, drop: npt.NDArray[np.bool_], values: IntColumn) -> IntColumn:
    """Of each row that is not left out its value, and those of the rows inside of it that are."""
    whole = _kept(table.parent, drop)
    sums = np.zeros(len(table), np.int64)
    np.add.at(sums, whole[whole >= 0], values[whole >= 0])
    kept: IntColumn = sums[~drop]
    return kept


def without_rows(table: EventTable, drop: npt.NDArray[np.bool_]) -> EventTable:
    """Leave out these rows; of what they launched, and of rows inside them, the row around them takes their place."""
    keep = np.flatnonzero(~drop)
    place = np.cumsum(~drop, dtype=np.int32) - 1
    whole = _kept(table.parent, drop)

    def moved(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        around = np.where(rows >= 0, whole[rows], rows)
        return np.where(around >= 0, place[around], around)

    kernels = table.kernels
    if kernels is not None:
        kernels = replace(kernels, row=moved(kernels.row).astype(np.int64))
    return replace(
        table,
        name=table.name[keep],
        kind=table.kind[keep],
        argument=table.argument[keep],
        start_ns=table.start_ns[keep],
        end_ns=table.end_ns[keep],
        thread=table.thread[keep],
        sequence=table.sequence[keep],
        forward_thread=table.forward_thread[keep],
        parent=moved(table.parent[keep]).astype(np.int32),
        depth=(table.depth - _dropped_above(table, drop))[keep],
        kernels=kernels,
        shapes=None if table.shapes is None else tuple(table.shapes[row] for row in keep.tolist()),
    )


def _dropped_above(table: EventTable, drop: npt.NDArray[np.bool_]) -> Int32Column:
    """How many of the rows around each row are left out."""
    found = np.zeros(len(table), np.int32)
    for level in range(1, int(table.depth.max(initial=0)) + 1):
        rows = np.flatnonzero(table.depth == level)
        above = table.parent[rows]
        found[rows] = found[above] + drop[above]
    return found


def _kept(parent: Int32Column, drop: npt.NDArray[np.bool_]) -> IntColumn:
    """The innermost undropped row around each row: itself if it is not dropped; -1 for none."""
    found = np.arange(len(parent))
    while (inside := np.flatnonzero((found >= 0) & drop[found])).size:
        found[inside] = parent[found[inside]]
    return found


# What torch calls to begin a record_function range; under a dispatch mode each of these has a row, in which the range
# begins and after which it ends: rows that overlap without nesting.
_RANGE_CALLS = ("profiler::_record_function_enter", "PythonDispatchMode")
_MOST_RANGE_CALLS = 4  # of these inside each other


def _end_range_calls(
    name: Int32Column, start: IntColumn, end: IntColumn, thread: Int32Column, names: Interner, scopes: Sequence[int]
) -> IntColumn:
    """``end`` of sorted rows, with the calls that began a range ended where the range begins."""
    calls = np.array([text.startswith(_RANGE_CALLS) for text in names], bool)
    if not calls.any():
        return end
    result = end.copy()
    ranges = np.flatnonzero((np.array(scopes, np.int64) == USER_SCOPE)[name])
    for distance in range(1, _MOST_RANGE_CALLS + 1):
        ranges = ranges[ranges >= distance]
        before = ranges - distance
        begins = calls[name[before]] & (thread[before] == thread[ranges])
        begins &= (end[before] > start[ranges]) & (end[before] < end[ranges])
        result[before[begins]] = start[ranges[begins]]
    return result


def make_table(columns: RawColumns, names: Interner, scopes: Sequence[int], *, calls: bool = True) -> EventTable:
    """Columns as they were read -> sorted, nested and classified; ``calls`` as in :func:`read_trace`."""
    if not calls:
        is_call = np.array([text.startswith(markers.CALL) for text in names], bool)
        columns.end_ns = np.where(is_call[columns.name], columns.start_ns, columns.end_ns)
    order = row_order(columns)
    start, thread = columns.start_ns[order], columns.thread[order]
    name = columns.name[order]
    end = _end_range_calls(name, start, columns.end_ns[order], thread, names, scopes)
    parent, depth, end = nest(start, end, thread)
    classified = classify_names(names, scopes)
    return EventTable(
        names=classified.canonical,
        name=classified.renamed[name],
        kind=classified.kind[name],
        argument=classified.argument[name],
        start_ns=start,
        end_ns=end,
        thread=thread,
        sequence=columns.sequence[order],
        forward_thread=columns.forward_thread[order],
        parent=parent,
        depth=depth,
        shapes=None if columns.shapes is None else tuple(columns.shapes[row] for row in order.tolist()),
    )


def row_order(columns: RawColumns) -> IntColumn:
    """The order of an :class:`EventTable`: by thread and start, the longest of equal starts first."""
    return np.lexsort((-columns.end_ns, columns.start_ns, columns.thread))


def _column(events: Sequence[Any], attribute: str, convert: Callable[[Any], int] | None = None) -> IntColumn:
    """One attribute of every event, through the unbound accessor: about 0.1 µs an event."""
    if not events:
        return np.empty(0, np.int64)
    values = map(getattr(type(events[0]), attribute), events)
    return np.fromiter(map(convert, values) if convert else values, dtype=np.int64, count=len(events))


def _shape_texts(events: Sequence[Any]) -> list[str]:
    """Equal texts are one object: a step has few shapes."""
    known: dict[str, str] = {}
    return [known.setdefault(text, text) for text in (_shape_text(event.shapes()) for event in events)]


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``[[8, 64], [], [64, 64]]`` -> ``"[8, 64] [64, 64]"``: scalars and non-tensors have no shape worth showing."""
    return " ".join(str(list(shape)) for shape in shapes if shape)
