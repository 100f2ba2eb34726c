"""CPU events as columns: read by walking kineto's event trees, with which event encloses which.

What an aten op calls once it is below autograd (``as_strided`` under ``transpose``, ``copy_`` under ``clone``) is not
read: a third of all events, whose time stays with the op.

The trees do not say which thread ran the forward of a backward node. Where only one thread has drawn sequence numbers
it can be no other; where several have, :func:`read_tree` gives up and the list has to be read.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.ma  # np.unique loads it, which takes a descriptor: by then the user may have left none

from gradscope import markers
from gradscope.ops import ATEN
from gradscope.tables import Int32Column, IntColumn


@dataclass(slots=True)
class RawColumns:
    """One entry an event; the columns of :class:`~gradscope.tables.EventTable` before sorting and nesting."""

    name: Int32Column  # index into an Interner
    start_ns: IntColumn
    end_ns: IntColumn
    thread: Int32Column
    sequence: IntColumn
    forward_thread: Int32Column
    correlation: IntColumn | None = None  # what a kernel names the row by that launched it
    shapes: list[str] | None = None


class Interner(dict[str, int]):
    """Numbers texts in the order in which they are first asked for."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


# An op of this kind without a sequence number runs below autograd: nothing under it draws numbers or calls user code.
BELOW_AUTOGRAD = ATEN


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A million short-lived objects would set off collections that find nothing and triple the time of a column."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_CHUNK = 4096
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_EVALUATE = "autograd::engine::evaluate_function: "


_name, _fields, _sequence = attrgetter("name"), attrgetter("extra_fields"), attrgetter("sequence_number")
_start, _end, _start_tid = attrgetter("start_time_ns"), attrgetter("end_time_ns"), attrgetter("start_tid")


def read_tree(roots: list[Any], *, whole: bool = False) -> tuple[RawColumns, Interner, list[int]] | None:
    """Columns, names and the scope of each name; None where several threads ran forward. Empties ``roots``.

    Args:
        whole: read what aten ops call too.
    """
    names, scopes = Interner(), array("b")
    name, thread, start, end, sequence = array("i"), array("i"), array("q"), array("q"), array("q")
    shared: set[int] = set()  # names that both a node's function and an ordinary op may have
    functions: list[int] = []  # rows of such a name that are a node's function
    stack, stack_threads = roots, array("i", map(_start_tid, roots))
    while stack:
        # A chunk at a time through map: less time than a loop over single events, and bounded memory.
        first = len(name)
        chunk, threads = stack[-_CHUNK:], stack_threads[-_CHUNK:]
        del stack[-_CHUNK:], stack_threads[-_CHUNK:]
        texts = list(map(_name, chunk))
        fields = list(map(_fields, chunk))
        chunk_names = list(map(names.__getitem__, texts))
        if len(names) > len(scopes):
            for number, text, field in zip(chunk_names, texts, fields, strict=True):
                if number == len(scopes):
                    scopes.append(int(field.scope))
                    if _may_be_both(text):
                        shared.add(number)
        numbers = list(map(_sequence, fields))
        name.extend(chunk_names)
        thread.extend(threads)
        start.extend(map(_start, chunk))
        end.extend(map(_end, chunk))
        sequence.extend(numbers)
        if not shared.isdisjoint(chunk_names):
            functions += [
                first + row
                for row, number in enumerate(chunk_names)
                if number in shared and int(fields[row].scope) == _BACKWARD_SCOPE
            ]
        for event, text, number, thread_number in zip(chunk, texts, numbers, threads, strict=True):
            if number < 0 and not whole and text.startswith(BELOW_AUTOGRAD):
                continue
            children = event.children
            if children:
                stack += children
                stack_threads.extend([thread_number] * len(children))
    of_node = np.array(
        [
            text.startswith(_EVALUATE) or (scope == _BACKWARD_SCOPE and number not in shared)
            for number, (text, scope) in enumerate(zip(names, scopes, strict=True))
        ],
        bool,
    )
    numbers_column: IntColumn = np.frombuffer(sequence, np.int64)
    thread_column = np.frombuffer(thread, np.int32)
    name_column = np.frombuffer(name, np.int32)
    backward = of_node[name_column]
    backward[functions] = True
    drew = np.unique(thread_column[(numbers_column >= 0) & ~backward])
    if len(drew) > 1:
        return None
    made_by = int(drew[0]) if len(drew) else 0
    start_column, end_column = np.frombuffer(start, np.int64), np.frombuffer(end, np.int64)
    if len(end_column):
        # What was open when the profiler stopped has no end in torch 2.11; it lasted to the end of the trace.
        end_column = np.where(end_column < start_column, end_column.max(), end_column)
    columns = RawColumns(
        name=name_column,
        start_ns=start_column,
        end_ns=end_column,
        thread=thread_column,
        sequence=numbers_column,
        forward_thread=np.where(backward & (numbers_column >= 0), made_by, 0).astype(np.int32),
    )
    return columns, names, scopes.tolist()


def _may_be_both(text: str) -> bool:
    """``XBackward`` is the node of a Function ``X``, and may be another Function that X's backward applies.

    Torch's own nodes end in a digit.
    """
    return not text.startswith((BELOW_AUTOGRAD, _EVALUATE, markers.PREFIX)) and not text[-1:].isdigit()


def nest(start_ns: IntColumn, end_ns: IntColumn, thread: Int32Column) -> tuple[Int32Column, Int32Column, IntColumn]:
    """Parent and depth of each row, and ends that reach at most to the parent's.

    Args:
        start_ns, end_ns, thread: columns sorted by (thread, start, longest first).

    Returns:
        ``(parent, depth, end_ns)``; ``parent`` is -1 at depth 0. An end beyond the parent's (two rows of a thread
        that overlap without nesting, as asynchronous rows do) is cut to it, so that self times stay >= 0.
    """
    parent = np.full(len(start_ns), -1, np.int32)
    depth = np.zeros(len(start_ns), np.int32)
    end = end_ns.copy()
    bounds = np.flatnonzero(np.diff(thread)) + 1
    for rows in np.split(np.arange(len(start_ns)), bounds) if len(start_ns) else []:
        first, last = int(rows[0]), int(rows[-1]) + 1
        _nest_thread(start_ns[first:last], end[first:last], parent[first:last], depth[first:last], first)
    return parent, depth, end


def _nest_thread(start: IntColumn, end: IntColumn, parent: Int32Column, depth: Int32Column, offset: int) -> None:
    """Fill ``parent`` and ``depth`` of one thread's rows and cut ``end``; all in place."""
    # Twice the time, so that an empty event can be closed half a tick after it opened: [2s, 2s+1] holds nothing
    # that starts later and lies inside whatever else starts at s.
    opened = 2 * (start - start[0])
    closed = 2 * (end - start[0]) + (end == start)
    # Row i is inside every earlier row that has not closed when it opens.
    finished = np.searchsorted(np.sort(closed), opened, side="right")
    level = (np.arange(len(start)) - finished).astype(np.int32)
    np.maximum(level, 0, out=level)
    depth[:] = level
    above = np.flatnonzero(level == 0)
    whole = end.copy()
    for current in range(1, int(level.max(initial=0)) + 1):
        rows = np.flatnonzero(level == current)
        local = above[np.searchsorted(above, rows) - 1]
        parent[rows] = local + offset
        end[rows] = np.minimum(end[rows], end[local])
        above = rows
    if (end != whole).any():
        end[:] = whole
        _nest_one_by_one(opened, closed, start, end, parent, depth, offset)


def _nest_one_by_one(
    opened: IntColumn,
    closed: IntColumn,
    start: IntColumn,
    end: IntColumn,
    parent: Int32Column,
    depth: Int32Column,
    offset: int,
) -> None:
    """The same where rows overlap without nesting: what begins behind the end that a row is cut to is not inside of it.

    Args:
        opened, closed: the beginnings and ends in half ticks.
    """
    first, openings, until = int(start[0]), opened.tolist(), closed.tolist()
    inside: list[int] = []
    for row, begins in enumerate(openings):
        while inside and until[inside[-1]] <= begins:
            inside.pop()
        depth[row] = len(inside)
        parent[row] = inside[-1] + offset if inside else -1
        if inside and until[row] > until[inside[-1]]:
            until[row] = until[inside[-1]]
            end[row] = max(first + until[row] // 2, int(start[row]))
        inside.append(row)
