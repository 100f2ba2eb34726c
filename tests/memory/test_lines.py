"""What each source line spent of memory, and of which layer a line is that only the memory pass saw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gradscope.attribute.memory.by_layer import LineMemory, amounts_of_lines, with_memory_of_lines
from gradscope.attribute.memory.classify import SavedStorage
from gradscope.tables import LineInfo, LineRow, ModuleInfo, SavedTensor

LINES = [LineInfo("/m/a.py", 3, "forward"), LineInfo("/m/a.py", 8, "forward"), LineInfo("/m/b.py", 3, "loss")]
MODULES = [ModuleInfo("", "Net", None, 0, None), ModuleInfo("head", "Linear", "", 0, None)]


def note(size: int) -> SavedTensor:
    return SavedTensor(0, 1, "Mul", "x", 1, size, "2", "f")


def step(saved: list[tuple[int, int, int]], allocated: list[tuple[int, int, int]]) -> Any:
    """A step of (line, layer, bytes) of each storage that was saved, and of each allocation."""
    line, layer, amount = (np.array(part, np.int64) for part in zip(*allocated, strict=True))
    return SimpleNamespace(
        lines=LINES,
        storages=[SavedStorage(0, note(size), owner, at) for at, owner, size in saved],
        allocated=lambda: (np.arange(len(line)), amount),
        trace=SimpleNamespace(line=lambda rows: line[rows], owner=lambda rows: layer[rows]),
    )


def test_amounts_of_a_line_add_up_and_name_a_layer_of_it() -> None:
    given = step([(0, 1, 100), (0, 1, 20), (-1, 1, 7)], [(0, 1, 64), (1, 0, 32), (0, 1, 8), (-1, 0, 5)])
    found = amounts_of_lines(given, {1: 9, 2: 4, -1: 3})
    assert found == {
        ("/m/a.py", 3): LineMemory(1, saved_bytes=120, allocated_bytes=72),
        ("/m/a.py", 8): LineMemory(0, allocated_bytes=32, copied_bytes=9),
        ("/m/b.py", 3): LineMemory(-1, copied_bytes=4),
    }


def test_lines_that_only_the_memory_pass_saw_come_last_with_their_layer() -> None:
    memory = {
        ("/m/b.py", 3): LineMemory(-1, copied_bytes=4),
        ("/m/a.py", 3): LineMemory(1, 120, 72),
        ("/m/a.py", 8): LineMemory(1, saved_bytes=5),
    }
    timed = [
        LineRow("a.py", 3, "forward", "y = x * 2", "", forward_ns=10, backward_ns=20),
        LineRow("a.py", 5, "forward", "y += 1", "", forward_ns=1, backward_ns=2),
    ]
    shown = {("/m/a.py", 3): ("a.py", "y = x * 2"), ("/m/a.py", 8): ("a.py", "return y")}
    rows = with_memory_of_lines(timed, memory, LINES, MODULES, shown)
    found = [
        (
            row.file,
            row.line,
            row.text,
            row.layer,
            row.backward_ns,
            row.saved_bytes,
            row.allocated_bytes,
            row.copied_bytes,
        )
        for row in rows
    ]
    assert found == [
        ("a.py", 3, "y = x * 2", "", 20, 120, 72, 0),
        ("a.py", 5, "y += 1", "", 2, 0, 0, 0),
        ("/m/b.py", 3, "", None, 0, 0, 0, 4),
        ("a.py", 8, "return y", "head", 0, 5, 0, 0),
    ]
    assert rows[3].function == "forward"
