"""Rows around the waits for collectives that Python makes: what they are called, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from gradscope.compat import engine, marking_waits
from gradscope.ops import UNKNOWN_WAIT, WAIT_ROW

Work: Any = torch._C._distributed_c10d.Work


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What rows are written; waits return at once."""
    names: list[str] = []

    def marker(name: str) -> Any:
        names.append(name)
        return nullcontext()

    monkeypatch.setattr(engine, "TraceMarker", marker)
    monkeypatch.setattr(Work, "wait", lambda self, *args, **kwargs: (args, kwargs))
    yield names


class _Fake:
    def __init__(self, number: int) -> None:
        self._get_op_type = lambda: number


def test_each_wait_says_for_which_collective_it_is(marked: list[str]) -> None:
    """torch has numbers for what it does not know, below all others and above."""
    known = len(engine._OPERATIONS)
    numbers = range(-3, known + 3)
    with marking_waits():
        for number in numbers:
            assert Work.wait(_Fake(number), 5, timeout=3) == ((5,), {"timeout": 3})
        Work.wait(object())
    names = [engine._OPERATIONS[number] if 0 <= number < known else UNKNOWN_WAIT for number in numbers]
    assert marked == [f"{WAIT_ROW} for {name}" for name in [*names, UNKNOWN_WAIT]]
    assert len(set(engine._OPERATIONS)) == known


@pytest.mark.parametrize("failing", [False, True])
def test_torchs_own_comes_back(marked: list[str], failing: bool) -> None:
    before = Work.__dict__["wait"]
    with pytest.raises(ValueError) if failing else nullcontext(), marking_waits():
        assert Work.__dict__["wait"] is not before
        if failing:
            raise ValueError
    assert Work.__dict__["wait"] is before
    Work.wait(_Fake(0))
    assert marked == []


def test_what_others_put_in_its_place_meanwhile_stays(marked: list[str]) -> None:
    """Another profiler's, begun in the block and ended behind it."""
    with marking_waits():
        ours = Work.__dict__["wait"]

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return "theirs", ours(self, *args, **kwargs)

        Work.wait = theirs
    assert Work.__dict__["wait"] is theirs
    assert Work.wait(_Fake(1)) == ("theirs", ((), {}))
