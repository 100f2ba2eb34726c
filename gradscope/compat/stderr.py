"""What torch's C++ logs to file descriptor 2 while a profiler starts and stops, held back."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Drop the log lines that kineto writes to file descriptor 2 when a profiler starts or stops.

    Everything else that is written meanwhile reaches stderr afterwards. Where stderr has no descriptor, do nothing.
    """
    with held_stderr(_is_kineto_log):
        yield


@contextlib.contextmanager
def held_stderr(drop: Callable[[bytes], bool]) -> Iterator[int | None]:
    """Hold back what is written to file descriptor 2, and write it afterwards without the lines to drop.

    Yields the descriptor of the file that holds it; None where stderr has no descriptor, or nothing can hold it.
    """
    try:
        saved = os.dup(2)
    except OSError:
        yield None
        return
    _flush_stderr()
    try:
        scratch = _scratch_file()
    except OSError:  # no descriptor left, or a system without a folder that can be written
        os.close(saved)
        yield None
        return
    with scratch as held:
        os.dup2(held.fileno(), 2)
        try:
            yield held.fileno()
        finally:
            _flush_stderr()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            kept = [line for line in held if not drop(line)]
            if kept:
                with contextlib.suppress(OSError):
                    os.write(2, b"".join(kept))


def _flush_stderr() -> None:
    with contextlib.suppress(Exception):  # the user's code may have put a stream of its own there, of any kind
        sys.stderr.flush()


def _scratch_file() -> IO[bytes]:
    """A file that needs no folder where the system has such."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.fdopen(os.memfd_create("gradscope"), "w+b")
    return tempfile.TemporaryFile()


def _is_kineto_log(line: bytes) -> bool:
    level, _, rest = line.partition(b":")
    return level in {b"USDT", b"INFO", b"STAGE", b"WARNING", b"ERROR"} and b".cpp:" in rest


UNKNOWN_BLOCK = b"Memory block of unknown size"


def is_log(line: bytes) -> bool:
    return _is_kineto_log(line) or UNKNOWN_BLOCK in line
