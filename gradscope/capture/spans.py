"""Notes which sequence numbers each module call and each source line drew, and marks them in the trace."""

from __future__ import annotations

import itertools
import threading
from array import array
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from gradscope.compat import TraceMarker, sequence_number
from gradscope.tables import SpanTable


class CallCost(NamedTuple):
    """What noting a span costs, in ns."""

    inside: int = 0  # of the span's own row
    around: int = 0  # of the row around it


class Span(NamedTuple):
    """One that is open."""

    number: int
    marker: Any
    began: int  # when its row did, by ``perf_counter_ns``


class SpanRecorder:
    """Opens and closes spans on any thread; one call that extends an array each, so that threads need no lock.

    Span ``k`` writes a marker row ``<prefix>k`` around itself and notes the sequence numbers before and after.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counter = itertools.count()
        # Numbers in arrays, for tuples that stay would make Python look for garbage more often.
        self._opened = array("q")  # k, label, low
        self._closed = array("q")  # k, high, ns that the row was open
        self._cost = array("q")  # k, ns inside of the span's row, ns around it

    def open(self, label: int) -> Span:
        """Open a span; hand the result to :meth:`close`, on the same thread."""
        number = next(self._counter)
        self._opened.extend((number, label, sequence_number()))
        marker = TraceMarker(self._prefix + str(number))
        marker.__enter__()
        return Span(number, marker, perf_counter_ns())

    def close(self, span: Span) -> int:
        """Close a span; returns when its row ended, by ``perf_counter_ns``."""
        ended = perf_counter_ns()  # the row ends at the beginning of what follows, as it began at the end of its enter
        span.marker.__exit__(None, None, None)
        self._closed.extend((span.number, sequence_number(), ended - span.began))
        return ended

    def charge(self, span: Span, inside_ns: int, around_ns: int) -> None:
        """Note what opening or closing it took: in its own row, and in the row around it."""
        self._cost.extend((span.number, inside_ns, around_ns))  # at once, whatever other threads do

    def __len__(self) -> int:
        """How many were opened so far."""
        return len(self._opened) // 3

    def layout(self, first: int, base: int) -> tuple[tuple[int, int], ...]:
        """Label and distance to number ``base`` of the spans from ``first`` on."""
        opened = self._opened[3 * first :]
        return tuple((label, base - low) for label, low in zip(opened[1::3], opened[2::3], strict=True))

    def labels(self) -> set[int]:
        """Labels of all spans so far."""
        return set(self._opened[1::3])

    def table(self) -> SpanTable:
        """All spans so far, row k for span k."""
        number, labels, first = _columns(self._opened, 3)
        label, low, opened = np.full(len(number), -1, np.int64), *np.zeros((2, len(number)), np.int64)
        label[number], low[number] = labels, first
        high = low.copy()
        number, last, open_ns = _columns(self._closed, 3)
        high[number], opened[number] = last, open_ns
        if not len(self._cost):
            return SpanTable(label, low, high)
        number, *charged = _columns(self._cost, 3)
        inside, around = np.zeros((2, len(label)), np.int64)
        for total, ns in zip((inside, around), charged, strict=True):
            np.add.at(total, number, ns)
        return SpanTable(label, low, high, inside, around, opened)


def _columns(numbers: array[int], count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64).reshape(-1, count).T


class SpanStack(threading.local):
    """The open module calls of one thread, innermost last."""

    def __init__(self) -> None:
        # id of the module, its span, and whether no hook of torch's has told of the call.
        self.calls: list[tuple[int, Span | None, bool]] = []
