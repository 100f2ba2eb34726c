"""Where a run is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time

from gradscope.tables import Progress

# A step that is being measured pays for what is drawn between it and the next: rarely, and without rich, whose
# live display redraws from a thread of its own.
_REDRAW_SECONDS = 0.1
_CLEAR_LINE = "\r\x1b[2K"


class StderrProgress(Progress):
    """One line a phase, or one line that follows the steps.

    Args:
        live: redraw one line; only for a terminal, and only while nobody else writes to it.
    """

    def __init__(self, *, live: bool) -> None:
        self._stream = sys.stderr  # the user's code may replace it
        self._live = live
        self._name = ""
        self._total: int | None = None
        self._step = 0
        self._drawn = 0.0
        self._busy = ""
        self._told: set[str] = set()  # what the program was busy with, where lines are not drawn again

    def phase(self, name: str, total: int | None = None) -> None:
        self._name, self._total, self._step = name, total, 0
        if self._live:
            self._draw()
        elif total is None:
            self._write(f"gradscope: {name}\n")
        else:
            self._write(f"gradscope: {name}, {total} step{'' if total == 1 else 's'}\n")

    def advance(self) -> None:
        self._step += 1
        if self._live and time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def say(self, text: str) -> None:
        self._write(f"{_CLEAR_LINE if self._live else ''}gradscope: {text}\n")

    def busy(self, name: str) -> None:
        self._busy = name
        if self._live:
            self._draw()
        elif name and name not in self._told:
            self._told.add(name)
            self._write(f"gradscope: {self._name}: {name}\n")

    def done(self) -> None:
        if self._live:
            self._write(_CLEAR_LINE)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        steps = "" if self._total is None else f" {self._step}/{self._total}"
        busy = f", {self._busy}" if self._busy else ""
        self._write(f"{_CLEAR_LINE}gradscope: {self._name}{steps}{busy}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it: the run goes on
            self._stream.write(text)
            self._stream.flush()


def make_progress(*, quiet: bool, live: bool) -> Progress:
    """The progress display that fits stderr; ``live`` is a wish that only a terminal grants."""
    if quiet:
        return Progress()
    return StderrProgress(live=live and sys.stderr.isatty())
