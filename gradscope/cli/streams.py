"""Who may write where: stdout is the report's, and the script's where the report leaves it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

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
        with contextlib.suppress(OSError, ValueError):
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
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """Write to ``stream`` inside the block; a reader that closes the pipe early, ``head`` for one, is no error."""
    try:
        yield
        stream.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        # What is still in the buffer would fail again, and noisily, when the interpreter closes the stream.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
