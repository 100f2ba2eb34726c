"""Raw profiler events -> :class:`~gradscope.tables.EventTable`. The only reader of kineto's events.

Reading goes column by column through ``map`` over the unbound accessors: about 1 µs an event for what CPU rows need.
Nesting is found by sorting, not by walking a stack in Python, so that a million events stay a matter of seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradscope.tables import EventTable, IntColumn
from gradscope.trace.kernels import read_kernels, split_devices
from gradscope.trace.names import NameReader
from gradscope.trace.nesting import nest


def read_events(events: list[Any], *, device: bool = False, shapes: bool = False) -> EventTable:
    """Read the raw events of one stopped profiler; empties ``events`` to give its memory back early.

    Args:
        events: ``kineto_results.events()``.
        device: the trace may hold device activities (CUDA).
        shapes: read the input shapes of each row.
    """
    with _no_garbage_collection():
        kernels, host = None, events
        if device:
            host, device_events = split_devices(events)
            kernels = read_kernels(device_events)
        reader = _Columns(host)
        names = NameReader()
        name = names.read(host)
        start = reader.int64("start_ns")
        end = start + reader.int64("duration_ns")
        thread = reader.int64("start_thread_id").astype(np.int32)
        sequence = reader.int64("sequence_nr")
        forward_thread = reader.int64("fwd_thread_id").astype(np.int32)
        correlation = reader.int64("correlation_id") if device else None
        shape_texts = [_shape_text(event.shapes()) for event in host] if shapes else None
        host.clear()
        events.clear()
    order = np.lexsort((-end, start, thread))
    name, start, thread = name[order], start[order], thread[order]
    parent, depth, end = nest(start, end[order], thread)
    kind, argument, name = names.classify(name)
    return EventTable(
        names=names.canonical,
        name=name,
        kind=kind,
        argument=argument,
        start_ns=start,
        end_ns=end,
        thread=thread,
        sequence=sequence[order],
        forward_thread=forward_thread[order],
        parent=parent,
        depth=depth,
        correlation=None if correlation is None else correlation[order],
        kernels=kernels,
        shapes=None if shape_texts is None else tuple(shape_texts[row] for row in order.tolist()),
    )


class _Columns:
    """Reads one attribute of every event into an array."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self._type = type(events[0]) if events else None

    def int64(self, attribute: str) -> IntColumn:
        if self._type is None:
            return np.empty(0, np.int64)
        accessor: Callable[[Any], int] = getattr(self._type, attribute)
        return np.fromiter(map(accessor, self._events), dtype=np.int64, count=len(self._events))


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``[[8, 64], [], [64, 64]]`` -> ``"[8, 64] [64, 64]"``: scalars and non-tensors have no shape worth showing."""
    return " ".join(str(list(shape)) for shape in shapes if shape)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million short-lived objects would set off collections that find nothing and triple the time of a column."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
