"""Notes which sequence numbers each module call and each source line drew, and marks them in the trace."""

from __future__ import annotations

import itertools
import threading
from array import array
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from gradscope.compat import end_range, open_range, sequence_number
from gradscope.tables import SpanTable


class CallCost(NamedTuple):
    """What noting a span costs, in ns."""

    inside: int = 0  # of the span's own row
    around: int = 0  # of the row around it


Span = tuple[int, Any, int]  # one that is open: its number, its marker, when its row began by ``perf_counter_ns``


class SpanRecorder:
    """Opens and closes spans on any thread; one call that extends an array each, so that threads need no lock.

    Span ``k`` writes a marker row ``<prefix>k`` around itself and notes the sequence numbers before and after.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counter = itertools.count()
        # Numbers in arrays, for tuples that stay would make Python look for garbage more often.
        self._opened = array("q")  # k, label, low, caller
        self._closed = array("q")  # k, high, ns that the row was open, ns of noting it inside of the row, and around it
        self._timed = False

    def open(self, label: int, caller: int = -1) -> Span:
        """Open a span; hand the result to :meth:`close`, on the same thread.

        Args:
            caller: number of the instruction that it was called from.
        """
        number = next(self._counter)
        self._opened.extend((number, label, sequence_number(), caller))
        return number, open_range(self._prefix + str(number)), perf_counter_ns()

    def close(self, span: Span, began: int = 0, inside_ns: int = 0, around_ns: int = 0) -> None:
        """Close a span.

        Args:
            began: when the work of closing it did, by ``perf_counter_ns``; 0 where it was not timed.
            inside_ns, around_ns: what opening it took, in its own row and in the row around it.
        """
        number, marker, opened = span
        ended = perf_counter_ns()  # the row ends at the beginning of what follows, as it began at the end of its enter
        end_range(marker)
        if began:
            self._timed = True
            inside_ns += ended - began
            around_ns += perf_counter_ns() - ended
        self._closed.extend((number, sequence_number(), ended - opened, inside_ns, around_ns))

    def __len__(self) -> int:
        """How many were opened so far."""
        return len(self._opened) // 4

    def layout(self, first: int, base: int) -> tuple[tuple[int, int], ...]:
        """Label and distance to number ``base`` of the spans from ``first`` on."""
        opened = self._opened[4 * first :]
        return tuple((label, base - low) for label, low in zip(opened[1::4], opened[2::4], strict=True))

    def labels(self) -> set[int]:
        """Labels of all spans so far."""
        return set(self._opened[1::4])

    def table(self) -> SpanTable:
        """All spans so far, row k for span k."""
        number, labels, first, callers = _columns(self._opened, 4)
        label, caller = np.full((2, len(number)), -1, np.int64)
        low, opened = np.zeros((2, len(number)), np.int64)
        label[number], low[number], caller[number] = labels, first, callers
        high = low.copy()
        number, *noted = _columns(self._closed, 5)
        inside, around = np.zeros((2, len(label)), np.int64)
        for column, values in zip((high, opened, inside, around), noted, strict=True):
            column[number] = values
        if not self._timed:
            return SpanTable(label, low, high, caller=caller)
        return SpanTable(label, low, high, inside, around, opened, caller)


def _columns(numbers: array[int], count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64).reshape(-1, count).T


class SpanStack(threading.local):
    """The open module calls of one thread, innermost last."""

    def __init__(self) -> None:
        # id of the module, its span, whether no hook of torch's has told of the call, and what opening the span took,
        # inside of its row and around it.
        self.calls: list[tuple[int, Span | None, bool, int, int]] = []
