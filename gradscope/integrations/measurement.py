"""What every integration does with :class:`gradscope.profiling`: begin, count steps, say what was found."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from gradscope.api import profiling
from gradscope.errors import NothingMeasuredError
from gradscope.process import rank_of_process
from gradscope.report.report import Report


class Measurement:
    """The first steps of one training; with several ranks each writes files of its own, and the first prints.

    A rank never stops by itself: the others would wait for it.

    Args:
        output: PREFIX of PREFIX.json and PREFIX.html; None writes nothing.
        stop: whether training is to end when enough is measured.
        options: of :class:`gradscope.profiling`.
    """

    def __init__(self, output: str | None, options: dict[str, Any], *, stop: bool = False) -> None:
        self.report: Report | None = None
        self.stops = stop and rank_of_process() is None
        self._output = output
        self._options = options
        self._prof: profiling | None = None

    def begin(self, model: nn.Module | None) -> None:
        """Training begins; one that is profiled already goes on being so."""
        if self._prof is None and self.report is None:
            self._prof = profiling(model, **self._options)
            self._prof.__enter__()

    def step(self) -> bool:
        """An optimizer step has ended; True from the one on that was the last to be measured."""
        if self._prof is not None and self._prof.step():
            self.end()
        return self._prof is None

    def end(self) -> None:
        """Report what was measured; nothing where that has been done."""
        prof, self._prof = self._prof, None
        if prof is None:
            return
        prof.__exit__(None, None, None)
        try:
            self.report = prof.report
        except NothingMeasuredError as error:
            warnings.warn(f"gradscope: {error}", stacklevel=2)
            return
        ranks = rank_of_process()
        if ranks is None or ranks[0] == 0:
            self.report.print()
        if self._output is not None:
            path = Path(self._output if ranks is None else f"{self._output}.rank{ranks[0]}")
            self.report.save(path.with_name(path.name + ".json"), force=True)
            self.report.to_html(path.with_name(path.name + ".html"), force=True)

    def drop(self) -> None:
        """Training ended in an error: let go of it."""
        prof, self._prof = self._prof, None
        if prof is not None:
            prof.__exit__(None, None, None)

    def __del__(self) -> None:
        self.drop()
