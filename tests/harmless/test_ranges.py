"""No range of a trace outlives the profiler that it writes to: it would end through a pointer into freed memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.profiler import profile, record_function

import gradscope
from gradscope.capture.modules import SpanRecorder
from gradscope.compat import profilers


class _Range:
    """torch's range, and which of them are open."""

    open: ClassVar[set[_Range]] = set()

    def __init__(self, name: str) -> None:
        self._range = _TORCHS(name)

    def __enter__(self) -> None:
        self._range.__enter__()
        self.open.add(self)

    def __exit__(self, *exc: object) -> None:
        self.open.remove(self)
        self._range.__exit__(None, None, None)


_TORCHS: Any = profilers._RecordFunctionFast


@pytest.fixture
def open_at_stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many of gradscope's ranges were open each time that one of its profilers stopped."""
    counts: list[int] = []
    stop = profilers._CpuProfiler.stop

    def counted(self: Any) -> None:
        counts.append(len(_Range.open))
        stop(self)

    monkeypatch.setattr(profilers, "_RecordFunctionFast", _Range)
    monkeypatch.setattr(profilers._CpuProfiler, "stop", counted)
    yield counts
    assert counts and not any(counts)
    assert not _Range.open


def _steps(model: nn.Module, after: Any = lambda: None) -> None:
    x = torch.ones(4, 8)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        done = False
        while not done:
            model(x).mean().backward()
            after()
            done = prof.step()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class _Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.left = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.release()
        self.left.acquire(timeout=60)
        return x


def test_another_thread_is_inside_a_call_when_a_profiler_stops(open_at_stop: list[int]) -> None:
    waits, ended = _Waits(), threading.Event()

    def call() -> None:
        while not ended.is_set():
            waits(torch.ones(1))

    def next_call() -> None:
        waits.left.release()
        assert waits.entered.acquire(timeout=60)

    thread = threading.Thread(target=call)
    thread.start()
    assert waits.entered.acquire(timeout=60)
    try:
        _steps(_model(), next_call)
    finally:
        ended.set()
        waits.left.release(2)
        thread.join()


@pytest.mark.hostile_objects
def test_an_error_while_a_call_is_closed(open_at_stop: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(SpanRecorder, "close", fail)
    _steps(_model())


def test_a_range_of_the_users_that_is_open_over_all_steps_is_theirs_again(open_at_stop: list[int]) -> None:
    profilers: list[Any] = []

    def reopen() -> None:
        while profilers:
            profilers.pop().__exit__(None, None, None)
        profilers.append(record_function("the user's"))
        profilers[-1].__enter__()

    _steps(_model(), reopen)
    while profilers:
        profilers.pop().__exit__(None, None, None)
    with profile() as prof, record_function("the user's"):
        torch.ones(1)
    assert [event.name for event in prof.events()].count("the user's") == 1
