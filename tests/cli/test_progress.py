"""Progress on stderr: lines where it is not a terminal, one line that is redrawn where it is."""

from __future__ import annotations

import io
import sys

import pytest

from gradscope.cli import progress as module
from gradscope.cli.progress import StderrProgress, make_progress
from gradscope.tables import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def steps(progress: Progress) -> None:
    progress.phase("warm-up", 1)
    progress.advance()
    progress.phase("profiled steps", 3)
    for _ in range(3):
        progress.advance()
    progress.phase("reading 1,234 events")
    progress.done()


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    steps(make_progress(quiet=False, live=True))
    assert out.getvalue() == (
        "gradscope: warm-up, 1 step\ngradscope: profiled steps, 3 steps\ngradscope: reading 1,234 events\n"
    )


def test_lines_on_a_terminal_that_a_script_writes_to_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    steps(make_progress(quiet=False, live=False))
    assert "\r" not in out.getvalue()
    assert out.getvalue().count("\n") == 3


def test_one_line_that_is_redrawn_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    now = iter([0.0, 0.01, 1.0, 1.05, 1.2, 1.2, 1.25, 2.0])  # a clock that the test knows
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    steps(make_progress(quiet=False, live=True))
    drawn = out.getvalue().split("\r\x1b[2K")
    assert drawn == [
        "",
        "gradscope: warm-up 0/1",
        "gradscope: profiled steps 0/3",
        "gradscope: profiled steps 2/3",
        "gradscope: reading 1,234 events",
        "",
    ]


def test_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    steps(make_progress(quiet=True, live=True))
    assert out.getvalue() == ""


def test_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Closed())
    steps(StderrProgress(live=False))
    steps(StderrProgress(live=True))


def test_it_keeps_the_stream_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    progress = make_progress(quiet=False, live=False)
    monkeypatch.setattr(sys, "stderr", second)
    steps(progress)
    assert first.getvalue() != ""
    assert second.getvalue() == ""
