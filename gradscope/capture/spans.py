"""Notes which sequence numbers each module call and each source line drew, and marks them in the trace."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from gradscope.compat import TraceMarker, sequence_number
from gradscope.tables import SpanTable


class SpanRecorder:
    """Opens and closes spans on any thread; one list append each, so that threads need no lock.

    Span ``k`` writes a marker row ``<prefix>k`` around itself and notes the sequence numbers before and after.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counter = itertools.count()
        self._opened: list[tuple[int, int, int]] = []  # (k, label, low)
        self._closed: list[tuple[int, int]] = []  # (k, high)

    def open(self, label: int) -> tuple[int, Any]:
        """Open a span; hand the result to :meth:`close`, on the same thread."""
        number = next(self._counter)
        self._opened.append((number, label, sequence_number()))
        marker = TraceMarker(self._prefix + str(number))
        marker.__enter__()
        return number, marker

    def close(self, span: tuple[int, Any]) -> None:
        number, marker = span
        marker.__exit__(None, None, None)
        self._closed.append((number, sequence_number()))

    def __len__(self) -> int:
        """How many were opened so far."""
        return len(self._opened)

    def layout(self, first: int, base: int) -> tuple[tuple[int, int], ...]:
        """Label and distance to number ``base`` of the spans from ``first`` on."""
        return tuple((label, base - low) for _, label, low in self._opened[first:])

    def labels(self) -> set[int]:
        """Labels of all spans so far."""
        return {label for _, label, _ in self._opened}

    def table(self) -> SpanTable:
        """All spans so far, row k for span k."""
        label = np.full(len(self._opened), -1, np.int64)
        low = np.zeros(len(self._opened), np.int64)
        for number, span_label, first in self._opened:
            label[number], low[number] = span_label, first
        high = low.copy()
        for number, last in self._closed:
            high[number] = last
        return SpanTable(label, low, high)


class SpanStack(threading.local):
    """The open module calls of one thread, innermost last."""

    def __init__(self) -> None:
        # id of the module, its span, and whether no hook of torch's has told of the call.
        self.calls: list[tuple[int, tuple[int, Any] | None, bool]] = []
