"""What every integration does with :class:`gradscope.profiling`: begin, count steps, say what was found."""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gradscope.api import profiling
from gradscope.capture.environment import rank_and_size
from gradscope.capture.session import is_measuring
from gradscope.errors import GradscopeError, NothingMeasuredError, OutputError, UsageError
from gradscope.interrupts import is_interruption
from gradscope.report.outfile import RUN_HEAD, check_output
from gradscope.report.report import Report
from gradscope.safe_text import cut, shown_path, shown_repr, visible

_SUFFIXES = (".json", ".html")

_DISPLACED = (
    "another measurement began after step {} of this training, which ended this one.\nMeasure before or after it."
)


class Measurement:
    """The first steps of one training; with several ranks each writes files of its own, and the first prints.

    A rank never stops by itself: the others would wait for it. Training goes on whatever goes wrong here: a warning
    says what.

    Args:
        output: PREFIX of PREFIX.json and PREFIX.html; None writes nothing. A file that gradscope did not write stays:
            PREFIX-2 is taken.
        stop: whether training is to end when enough is measured.
        options: of :class:`gradscope.profiling`.

    Raises:
        UsageError: an option is unknown or has no meaning, or ``output`` names no file.
        OutputError: the files cannot be written.
    """

    _prof: profiling | None = None  # also where __init__ has raised

    def __init__(self, output: str | os.PathLike[str] | None, options: dict[str, Any], *, stop: bool = False) -> None:
        self.report: Report | None = None
        self._output = _checked_output(output)
        self._options = _checked_options(options)
        self._stop = stop
        self._ranks: tuple[int, int] | None = None
        self._enough = False
        self._training: weakref.ref[Any] | None = None  # what stands for it while it runs

    def begin(self, model: nn.Module | None, training: object) -> None:
        """Training begins. Nothing is done inside a measurement of gradscope's, which sees this training by itself.

        Args:
            model: what is trained.
            training: any object that lives as long as it does, and is not the same for another one.
        """
        global _open
        if self.report is not None or is_measuring():
            return
        left = _open() if _open is not None else None
        if left is not None and left is not self and left._prof is not None and left._is_of(training):
            _warn("another callback of gradscope measures this training, so this one does not")
            return
        self._training, self._ranks = weakref.ref(training), rank_and_size()
        if _attempted("this training is not measured", lambda: self._enter(model)):
            _open = weakref.ref(self)

    def _enter(self, model: nn.Module | None) -> None:
        """Displace one that is left: where its training goes on and did not end in an error, it says so itself."""
        self.drop()
        prof = profiling(model, **self._options)
        prof.displaceable = True
        prof.__enter__()
        self._prof = prof

    def _is_of(self, training: object) -> bool:
        return self._training is not None and self._training() is training

    @property
    def stops(self) -> bool:
        """Whether the training is to end now: enough is measured, and no other rank waits for this one."""
        return self._stop and self._enough and self._ranks is None

    def step(self) -> None:
        """An optimizer step has ended."""
        if self._prof is not None:
            self._ranks = self._ranks or rank_and_size()
            if self._call(self._prof.step):
                self._enough = self._prof.displaced_after is None
                self.end()

    def pause(self) -> None:
        """What runs until :meth:`resume`, and what has run since the last step, is no part of a step."""
        if self._prof is not None:
            self._call(self._prof.pause)

    def resume(self) -> None:
        """The next step begins."""
        if self._prof is not None:
            self._call(self._prof.resume)

    def _call(self, method: Callable[[], bool | None]) -> bool:
        """What a method of the running measurement answers; one that fails ends it."""
        answer: list[bool] = []
        if not _attempted("this training is measured no further", lambda: answer.append(bool(method()))):
            self.drop()
        return any(answer)

    def end(self, why_nothing: str | None = None) -> None:
        """Report what was measured; nothing where that has been done. ``why_nothing``: said where nothing was."""
        prof, self._prof = self._prof, None
        if prof is None:
            return
        ranks = self._ranks or rank_and_size()
        if prof.displaced_after is not None:
            _warn(_DISPLACED.format(prof.displaced_after))
        try:
            prof.__exit__(None, None, None)
            self.report = prof.report
        except NothingMeasuredError as error:
            if prof.displaced_after is None:
                _warn(why_nothing or str(error))
        except Exception as error:
            if is_interruption(error):
                raise
            _warn(f"no report: {_text(error)}")
        else:
            self._show(self.report, ranks)

    def _show(self, report: Report, ranks: tuple[int, int] | None) -> None:
        if ranks is None or ranks[0] == 0:
            _attempted("the report cannot be printed", report.print)
        if self._output is not None:
            prefix = Path(self._output if ranks is None else f"{self._output}.rank{ranks[0]}")
            _attempted("no files are written", lambda: _write(report, prefix))

    def drop(self) -> None:
        """Training ended in an error: let go of it."""
        prof, self._prof = self._prof, None
        if prof is not None:
            _attempted("leaving the training", lambda: prof.__exit__(None, None, None))

    def __getstate__(self) -> dict[str, Any]:
        """All but what runs: a copy of a callback measures its own training."""
        return {**self.__dict__, "_prof": None, "_training": None}

    def __del__(self) -> None:
        self.drop()


_open: weakref.ref[Measurement] | None = None  # the one that began last


def _write(report: Report, prefix: Path) -> None:
    """Write both files, also where one of them cannot be written."""
    json, html = _free(prefix)
    _attempted("the run is not saved", lambda: report.save(json))
    _attempted("the page is not written", lambda: report.to_html(html))


def _free(prefix: Path) -> tuple[Path, Path]:
    """The paths of both files, the first with a number that are free or hold what gradscope wrote."""
    from gradscope.report.page import HTML_HEAD  # which needs the page's sources

    for number in itertools.count(1):
        json, html = _paths(prefix if number == 1 else prefix.with_name(f"{prefix.name}-{number}"))
        for path in (json, html):
            check_output(path, force=True)
        try:
            check_output(json, RUN_HEAD)
            check_output(html, HTML_HEAD)
        except OutputError:
            continue
        if number > 1:
            _warn(
                f"{shown_path(prefix)}{_SUFFIXES[0]} or {_SUFFIXES[1]} holds something else, so {json.name} is written"
            )
        break
    return json, html


def _paths(prefix: Path) -> tuple[Path, Path]:
    json, html = (prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES)
    return json, html


def _checked_output(output: object) -> str | None:
    """``output`` as it was given.

    Raises:
        UsageError: it names no file.
        OutputError: its files cannot be written.
    """
    if output is None:
        return None
    if not isinstance(output, str | os.PathLike):
        raise UsageError(f"output is {shown_repr(output)}; it must be a path without its ending, or None.")
    text = os.fspath(output)
    if not isinstance(text, str) or os.path.basename(text) in ("", ".", ".."):
        raise UsageError(f"output is {shown_repr(text)}, which names no file.\nGive a path without its ending: 'run'")
    for path in _paths(Path(text)):
        check_output(path, force=True)
    return text


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` as they are.

    Raises:
        UsageError: one is unknown, or has no meaning.
    """
    known = [name for name in inspect.signature(profiling).parameters if name != "model"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(
            f"{unknown[0]} is no option of GradscopeCallback.\nThere are output, stop, {', '.join(known)}."
        )
    profiling(None, **options)  # raises; the one that measures is made when the model is known
    return options


def _attempted(failed: str, call: Callable[[], object]) -> bool:
    """Whether ``call`` went well; what it raises becomes a warning that begins with ``failed``."""
    try:
        call()
    except Exception as error:
        if is_interruption(error):
            raise
        _warn(f"{failed}: {_text(error)}")
        return False
    return True


def _text(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, GradscopeError) else f"{type(error).__name__}: {cut(visible(text), 200)}"


def _warn(text: str) -> None:
    warnings.warn(f"gradscope: {text}", stacklevel=2)
