"""What other threads ran, told of traces made by hand; the steps end in thread 1."""

from __future__ import annotations

import pytest

from gradscope.attribute.rows import in_other_threads, read_skeleton
from gradscope.tables import PassNote, RowKind

from .hand import Row, spans, table_of

STEP = Row(RowKind.STEP, 0, 0, "step", argument=0)


def call(start: int, number: int = 0, thread: int = 2) -> Row:
    return Row(RowKind.CALL, start, start + 5, "call", thread=thread, argument=number)


def backward(start: int, thread: int) -> Row:
    return Row(RowKind.BACKWARD, start, start + 90, "backward", thread=thread, argument=0)


def node(start: int, thread: int) -> Row:
    return Row(RowKind.NODE, start, start + 80, "N", thread=thread, sequence=1, forward_thread=1)


@pytest.mark.parametrize(
    ("rows", "nested", "found"),
    [
        ([call(10)], (), ("forward",)),
        ([call(10, thread=1), backward(100, 1)], (False,), ()),
        ([call(10, number=1)], (), ()),  # a transform in a thread of a loader
        ([call(10, number=2)], (), ()),  # nobody's
        ([backward(100, 1), node(105, 2), call(110)], (False,), ()),  # the engine's thread runs a checkpoint again
        ([backward(100, 2)], (False,), ("backward",)),
        ([backward(100, 2)], (), ("backward",)),
        ([call(10), backward(100, 2)], (False,), ("forward", "backward")),
        ([backward(100, 1), backward(105, 2)], (False, True), ()),  # in a thread of the engine's, inside of the first
        ([backward(100, 2), backward(150, 1)], (True, False), ()),  # by when they began, whatever the threads
        ([backward(100, 2), backward(150, 1)], (False, True), ("backward",)),
    ],
)
def test_what_ran_elsewhere(rows: list[Row], nested: tuple[bool, ...], found: tuple[str, ...]) -> None:
    skeleton = read_skeleton(table_of(STEP, *rows), spans((0, 0, 0), (-2, 0, 0), (-1, 0, 0)), [-1], ("Transform",))
    assert in_other_threads(skeleton, [PassNote(0, 0, nested=each) for each in nested]) == found
