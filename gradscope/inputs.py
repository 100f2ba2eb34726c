"""Reading a file that somebody may have sent: a regular file of a sane size with UTF-8 text in it, or a reason."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, NoReturn

from gradscope import units

# A run of a hundred thousand layers has about 100 MB; parsing needs some ten times the size of the file.
MOST_BYTES = 500_000_000

_OWN_HANDLES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
)
# int() refuses text of thousands of digits; what has so many is no number of ours, and is told by its size alone.
_MOST_DIGITS = 20


class UnreadableError(ValueError):
    """A file cannot be read; the message says why: ``it is a folder``.

    Attributes:
        missing: there is no such file.
    """

    def __init__(self, reason: str, *, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


class NotJsonError(ValueError):
    """A text is not JSON; the message says why and where: ``Expecting value (line 1, column 1)``."""


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Return the text of the file at ``path``; never waits for a named pipe, and never reads a device.

    A pipe that the shell opened for this process (``<(...)``, ``/dev/stdin``) is read to its end.

    Args:
        path: of the file.
        most: bytes it may have.

    Raises:
        UnreadableError: it is missing, no regular file, too large or not UTF-8, or the system refuses to read it.
    """
    data = read_bytes(path, most, pipes=True)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not UTF-8 text (byte {error.start})") from error


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """Return what the file at ``path`` holds; as :func:`read_text`, but for any content.

    Args:
        pipes: read one that the shell opened for this process, which can be done once.

    Raises:
        UnreadableError: it is missing, no regular file or too large, or the system refuses to read it.
    """
    try:
        return _read_bytes(path, most, pipes)
    except FileNotFoundError as error:
        raise UnreadableError("no such file", missing=True) from error
    except OSError as error:
        raise UnreadableError(error.strerror or type(error).__name__) from error
    except MemoryError as error:
        raise UnreadableError("there is not enough memory for it") from error
    except ValueError as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError("a path cannot hold the character \\x00") from error


def _read_bytes(path: str | os.PathLike[str], most: int, pipes: bool) -> bytes:
    opened = os.stat(path)
    handed_over = pipes and stat.S_ISFIFO(opened.st_mode) and str(os.fspath(path)).startswith(_OWN_HANDLES)
    if not handed_over:
        _require_file(opened, most)
    # Not to wait, should a pipe have taken the file's place.
    without_waiting = 0 if handed_over else getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, os.O_RDONLY | without_waiting | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if not handed_over:
            _require_file(os.fstat(handle), most)
        data = file.read(most + 1)
    if len(data) > most:
        raise UnreadableError(_too_large(len(data), most))
    return data


def _require_file(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        reasons = [reason for is_kind, reason in _KINDS if is_kind(found.st_mode)]
        raise UnreadableError(reasons[0] if reasons else "it is not a file")
    if found.st_size > most:
        raise UnreadableError(_too_large(found.st_size, most))


def _too_large(size: int, most: int) -> str:
    return f"it has {units.size(size)}, and at most {units.size(most)} are read"


def parse_json(text: str, *, constants: bool = False, each: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """``text`` as Python's values. Numbers that no field can hold come as floats, infinite ones among them.

    Args:
        text: what a file held.
        constants: take NaN and infinity for numbers as well, where who reads them looks at each.
        each: given every object as soon as it is read, inner ones first; what it returns stands in its place.

    Raises:
        NotJsonError: it is not JSON, has NaN or infinity spelled out, or is nested too deeply.
    """
    if not text.strip():
        raise NotJsonError("it is empty")
    try:
        constant = float if constants else _refuse_constant
        return json.loads(text, parse_constant=constant, parse_int=_parse_int, object_hook=each)
    except json.JSONDecodeError as error:
        if _depth(text[: error.pos]) > _DEEPEST:  # where Python 3.13 gets further than those before it
            raise NotJsonError("its brackets are nested too deeply") from error
        raise NotJsonError(f"{error.msg} (line {error.lineno}, column {error.colno})") from error
    except RecursionError as error:
        raise NotJsonError("its brackets are nested too deeply") from error
    except MemoryError as error:
        raise NotJsonError("there is not enough memory for it") from error


_DEEPEST = 900  # levels, of some thousand that Python's own limit allows


def _depth(text: str) -> int:
    """Return how many brackets are open at the end of a piece of JSON."""
    brackets = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return brackets.count("[") + brackets.count("{") - brackets.count("]") - brackets.count("}")


def _refuse_constant(constant: str) -> NoReturn:
    raise NotJsonError(f"it contains {constant}")


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)
