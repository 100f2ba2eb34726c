"""Which line of the user's a look at the stack finds, and what its looks come to."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from gradscope.capture import loop
from gradscope.capture.callers import OURS, TORCH
from gradscope.capture.guard import Guard
from gradscope.capture.loop import LineSampler

LOADER = f"{TORCH}utils/data/dataloader.py"
DECORATOR = f"{TORCH}utils/_contextlib.py"
LINEAR = f"{TORCH}nn/modules/linear.py"
WATCHED_LOADER = f"{OURS}capture/loop.py"
HOOK = f"{OURS}capture/modules.py"
LIBRARY = "/usr/lib/python3/dist-packages/other/part.py"


def stack_of(*files: str) -> FrameType:
    """The innermost frame of calls through functions of these files, the outermost first; number n stands in line n."""
    inner: Any = sys._getframe
    for number, file in reversed(list(enumerate(files, start=1))):
        names = {"inner": inner}
        exec(compile("\n" * (number - 1) + "def call(): return inner()", file, "exec"), names)
        inner = names["call"]
    frame: FrameType = inner()
    return frame


@pytest.mark.parametrize(
    ("files", "place"),
    [
        (["/u/train.py"], ("/u/train.py", 1, False)),
        (["/u/train.py", "/u/data.py"], ("/u/data.py", 2, False)),  # the innermost
        (["/u/train.py", LIBRARY], ("/u/train.py", 1, False)),
        (["/u/train.py", LOADER, "/u/data.py"], ("/u/data.py", 3, True)),  # a Dataset
        (["/u/train.py", LOADER], ("/u/train.py", 1, True)),
        (["/u/train.py", WATCHED_LOADER, LOADER, "/u/data.py"], ("/u/data.py", 4, True)),
        (["/u/train.py", WATCHED_LOADER, LOADER], ("/u/train.py", 1, True)),  # it waits for a worker
        (["/u/train.py", WATCHED_LOADER], ("/u/train.py", 1, False)),
        (["/u/train.py", DECORATOR, "/u/evaluate.py"], ("/u/evaluate.py", 3, False)),  # @torch.no_grad()
        (["/u/train.py", LINEAR], None),  # a phase
        (["/u/train.py", LINEAR, "/u/model.py"], None),
        (["/u/train.py", HOOK], None),
        ([HOOK, "/u/train.py"], ("/u/train.py", 2, False)),  # gradscope runs the user's script
    ],
)
def test_the_users_line_outside_of_the_phases(files: list[str], place: tuple[str, int, bool] | None) -> None:
    frame = stack_of(*files)
    outermost: Any = frame
    for _ in files[1:]:
        outermost = outermost.f_back
    assert loop._place(_Cut(frame, outermost)) == place


class _Cut:
    """A frame as it were without the callers of ``last``."""

    def __init__(self, frame: Any, last: Any) -> None:
        self.f_code, self.f_lineno = frame.f_code, frame.f_lineno
        self.f_back = None if frame is last else _Cut(frame.f_back, last)


class _Looks:
    """Stands in for the event that ends the looks: so many of them, each of another place, at set times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: tuple[int, tuple[str, int, bool] | None]) -> None:
        self._times = iter([0, *(at for at, _ in looks)])
        self._places = iter([place for _, place in looks])
        self._left = len(looks)
        monkeypatch.setattr(loop.time, "perf_counter_ns", lambda: next(self._times))
        monkeypatch.setattr(loop, "_place", lambda _frame: next(self._places))

    def wait(self, _seconds: float) -> bool:
        self._left -= 1
        return self._left < 0


def facts(monkeypatch: pytest.MonkeyPatch, *looks: tuple[int, tuple[str, int, bool] | None]) -> list[dict[str, Any]]:
    sampler: Any = LineSampler(Guard())
    sampler._stop = _Looks(monkeypatch, *looks)
    sampler._sample()
    monkeypatch.undo()
    found: list[dict[str, Any]] = sampler.facts()
    return found


def test_each_look_stands_for_the_time_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that one was inside of a phase, whose time is nobody's."""
    data, log = ("/u/data.py", 5, True), ("/u/log.py", 7, False)
    found = facts(monkeypatch, (10, data), (40, log), (140, None), (150, data))
    assert found == [
        {"line": "/u/log.py:7", "share": 30 / 50, "loading": False},
        {"line": "/u/data.py:5", "share": 20 / 50, "loading": True},
    ]


def test_the_five_lines_of_most_time_and_their_shares_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    at, looks = 0, []
    for line in range(1, 8):
        at += line
        looks.append((at, ("/u/train.py", line, False)))
    found = facts(monkeypatch, *looks)
    assert [each["line"] for each in found] == [f"/u/train.py:{line}" for line in (7, 6, 5, 4, 3)]
    assert found[0]["share"] == 7 / 28


def test_no_look_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch) == []


def test_the_last_look_is_over_when_it_has_stopped() -> None:
    sampler: Any = LineSampler(Guard())
    over: list[bool] = []

    def look() -> None:
        sampler._stop.wait()
        time.sleep(0.05)
        over.append(True)

    sampler._sample = look
    sampler.start()
    sampler.stop()
    assert over


def test_the_thread_that_made_it_is_looked_at() -> None:
    """A script may train in another one than the main thread."""
    made: list[tuple[LineSampler, int]] = []
    thread = threading.Thread(target=lambda: made.append((LineSampler(Guard()), threading.get_ident())))
    thread.start()
    thread.join()
    ((sampler, number),) = made
    assert sampler._watched == number != threading.get_ident()
