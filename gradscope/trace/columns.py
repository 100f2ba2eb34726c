"""Events as columns, in whatever order and from whichever of torch's two interfaces they were read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
BELOW_AUTOGRAD = "aten::"


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
