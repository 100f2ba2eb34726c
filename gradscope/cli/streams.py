"""Who may write where: the report's stdout, the script's, the page's file."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from gradscope.cli.failure import say
from gradscope.errors import OutputError
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.report import Report


_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def report_stream(*, exclusive: bool, whole_process: bool) -> Iterator[TextIO]:
    """The stream that the report goes to: stdout.

    Args:
        exclusive: nobody else may write to it. Inside the block file descriptor 1 leads to stderr, so that the
            user's prints, their C code's and their subprocesses' go there.
        whole_process: leave it so after the block too: a thread or an exit handler of the user's may print yet.
    """
    if not exclusive:
        yield sys.stdout
    elif _writes_to_descriptor(sys.stdout):
        with _descriptor_moved(whole_process) as stream:
            yield stream
    else:  # replaced by somebody who runs us within their process
        stream = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield stream


@contextlib.contextmanager
def _descriptor_moved(whole_process: bool) -> Iterator[TextIO]:
    sys.stdout.flush()
    original = os.dup(_STDOUT)  # not inherited by subprocesses
    _point_stdout_at_stderr()
    try:
        with os.fdopen(os.dup(original), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        with contextlib.suppress(Exception):  # a stream of the user's own
            sys.stdout.flush()
        if not whole_process:
            os.dup2(original, _STDOUT)
        os.close(original)


def _point_stdout_at_stderr() -> None:
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # started without a stderr
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)


def _writes_to_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STDOUT
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def reader_may_leave(stream: TextIO, *, beside_files: bool = False) -> Iterator[None]:
    """Write to ``stream`` inside the block; a reader that closes the pipe early, ``head`` for one, is no error.

    What the stream's encoding cannot hold is spelled out, ``\\u2500``.

    Args:
        stream: stdout, as a rule.
        beside_files: all of it is in files too, so that a stdout that was closed from the start is no error either.

    Raises:
        OutputError: nothing can be written, since the stream is closed or the device full.
    """
    try:
        with _spelling_out(stream):
            yield
        stream.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        silence(stream)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        silence(stream)
        raise OutputError(f"stdout cannot be written: {error.strerror or error}.\n{_ELSEWHERE}") from error
    if (stream in _REOPENED or sys.stdout in _REOPENED) and not beside_files:
        raise OutputError(f"stdout is closed.\n{_ELSEWHERE}")


_ELSEWHERE = "Send it to a file or a pipe that takes it."
# Stands for a stream that was closed when the program began.
_REOPENED: list[TextIO] = []


def reopen_closed_streams() -> None:
    """Give the process a stdin, stdout and stderr that lead nowhere, where it was started without.

    Otherwise the next file that is opened gets the stream's number, and whatever is printed by C code ends up in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        with contextlib.suppress(OSError):
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:  # the number is taken: Python had another reason not to open it
                os.close(handle)
                handle = os.dup(number)
            stream = cast(TextIO, os.fdopen(handle, mode, encoding="utf-8", errors="backslashreplace"))
            setattr(sys, name, stream)
            if name == "stdout":
                _REOPENED.append(stream)


_KEPT: dict[int, int] = {}  # of stdout and stderr a descriptor that the user's code does not know


def keep_streams() -> None:
    """Remember where stdout and stderr lead, for :func:`restore_streams`."""
    for number in {_STDOUT, _STDERR} - set(_KEPT):
        with contextlib.suppress(OSError):
            _KEPT[number] = os.dup(number)  # not inherited by subprocesses


def restore_streams() -> None:
    """Open stdout and stderr again where the user's code has closed them: the report and what is said go there."""
    for number, name in ((_STDOUT, "stdout"), (_STDERR, "stderr")):
        if number not in _KEPT or not _is_closed(getattr(sys, name), number):
            continue
        with contextlib.suppress(OSError, ValueError):
            os.dup2(_KEPT[number], number)
            stream = os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
            setattr(sys, name, stream)


def _is_closed(stream: TextIO | None, number: int) -> bool:
    if stream is None or getattr(stream, "closed", False):
        return True
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _spelling_out(stream: TextIO) -> Iterator[None]:
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # it flushes, and what failed once fails again
            stream.reconfigure(errors=before)


def write_json(stream: TextIO, text: str) -> None:
    """Write JSON so that it is the same JSON in any encoding."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
    stream.write(_ODD.sub(_escaped, text) if encoding.startswith("utf") else _NOT_ASCII.sub(_escaped, text))


_ODD = re.compile("[\ud800-\udfff]")
_NOT_ASCII = re.compile("[^\\x00-\\x7f]")


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def silence(stream: TextIO) -> None:
    """Send what is left in the buffer nowhere: it would fail again, and noisily, when the interpreter closes it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def beside(run: Path) -> Path:
    """The page's place where none is given: ``run.html`` for ``run.json``."""
    return run.with_suffix(".html") if run.suffix == ".json" else Path(f"{run}.html")


def write_page(
    report: Report, path: Path, *, source: bool, force: bool, open_it: bool = False, quiet: bool = False
) -> None:
    """Write the page to ``path``, say so on stderr, and open it in a browser if that is asked for.

    Raises :class:`~gradscope.errors.OutputError` if the page cannot be written.
    """
    written = report.to_html(path, source=source, force=force)
    if not quiet:
        say(f"wrote {link(written, sys.stderr)}")
    if open_it and not webbrowser.open(written.resolve().as_uri()):
        say(f"no browser could be started: open {shown_path(written)} yourself")


def link(path: Path, stream: TextIO) -> str:
    """``path``, on a terminal as a link to the file (OSC 8); terminals without links show the path alone."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return shown_path(path)
    return f"\x1b]8;;{path.resolve().as_uri()}\x1b\\{shown_path(path)}\x1b]8;;\x1b\\"
