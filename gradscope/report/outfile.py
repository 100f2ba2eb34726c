"""Writing a report's files: whole or not at all, and never over a file that gradscope did not write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from gradscope.errors import GradscopeError, OutputError
from gradscope.safe_text import cut, shown_path, visible

# What a RUN.json begins with; enough to know our own file without reading all of it.
RUN_HEAD = re.compile(r'\s*\{\s*"schema_version":\s*\d+,\s*"gradscope":\s*"')

_HEAD_CHARS = 4096
_NAME = 40  # of the file's name in that of the one that is written first: both may have 255 bytes


def check_output(path: str | os.PathLike[str], head: re.Pattern[str] = RUN_HEAD, force: bool = False) -> None:
    """Raise :class:`OutputError` if :func:`write_text` would; cheap, so that a run can ask before it starts.

    ``head`` is what a file written by gradscope begins with. An empty file may always be replaced.
    """
    try:
        _check(Path(path), head, force=force)
    except GradscopeError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, a link to itself, a character that none has
        raise _unwritable(path, error) from error


def _check(target: Path, head: re.Pattern[str], *, force: bool) -> None:
    name = shown_path(target)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        target.stat()  # a link to itself, which Path.resolve lets pass from Python 3.13 on
    if target.is_dir():
        raise OutputError(f"{name} is a folder.\nGive the path of a file, such as {shown_path(target / 'run.json')}.")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise OutputError(
            f"{name} cannot be written: the folder {shown_path(folder)} does not exist.\nCreate it first."
        )
    if _is_special(target):
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"{name} cannot be written: no permission to write in {shown_path(folder)}.\nChoose another path."
        )
    if not force and target.exists() and not _is_ours(target, head):
        raise OutputError(
            f"{name} exists and was not written by gradscope.\nChoose another path, or replace it with --force "
            "(in Python: force=True)."
        )


def _unwritable(path: str | os.PathLike[str], error: Exception) -> OutputError:
    if "\0" in os.fspath(path):
        error = ValueError("embedded null byte")  # as Python says it, in some versions and calls
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    return OutputError(f"{shown_path(path)} cannot be written: {cut(visible(reason), 200)}.\nChoose another path.")


def write_text(
    path: str | os.PathLike[str],
    text: str,
    head: re.Pattern[str] = RUN_HEAD,
    force: bool = False,
    encoding: str = "utf-8",
) -> Path:
    """Write ``text`` to ``path`` and return it; readers see the old file or the new one, never a part.

    Lone surrogates, which a file name that is not UTF-8 has and UTF-8 has not, are spelled ``\\udcff``: JSON's own way.
    Raises :class:`OutputError` if the path cannot be written, or holds a file whose beginning does not match ``head``
    and ``force`` is not set.
    """
    check_output(path, head, force)
    target = Path(path)
    try:
        if _is_special(target):
            target.write_text(text, encoding=encoding, errors="backslashreplace")
        else:
            _replace(target.resolve(), text, encoding)  # through a symbolic link, not instead of it
    except OSError as error:
        raise _unwritable(path, error) from error
    return target


def _replace(target: Path, text: str, encoding: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:_NAME]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding=encoding, errors="backslashreplace", newline="\n") as file:
            file.write(text)
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _mode(target: Path) -> int:
    """The permissions of the file that is replaced; for a new one what ``open`` would have given."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _is_special(path: Path) -> bool:
    """A device or a pipe, such as /dev/stdout: written to, never replaced."""
    return path.exists() and not path.is_file()


def _is_ours(path: Path, head: re.Pattern[str]) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            start = file.read(_HEAD_CHARS)
    except OSError:
        return False
    return not start or bool(head.match(start))
