"""Changes the user's source files: what is written is what the diff shows, beside a backup, or nothing at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradscope.errors import OutputError
from gradscope.patching.edit.imports import hides_gradscope
from gradscope.patching.edit.source import decoded
from gradscope.report.outfile import write_text

_PACKAGES = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Edited:
    """A source file as it was read, and as it shall be; lines end in ``\\n`` in both."""

    name: str
    before: str
    after: str

    @property
    def shown(self) -> str:
        """The file's path, from the working folder where it lies below that."""
        path = Path(self.name)
        return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else self.name


def check_writable(files: Sequence[Edited], *, force: bool) -> None:
    """Ask before the long part of a run what :func:`write` would ask.

    Raises:
        OutputError: a file is not as it was read, cannot be written, belongs to an installed package, or has changes
            that git does not know; ``force`` overrules the last two, and a file's own write protection.
    """
    for file in files:
        _form(file)
        path = Path(file.name)
        if force:
            continue
        if hides := hides_gradscope(path):
            name = hides.name if hides.stem == "gradscope" else hides.parent.name
            raise OutputError(
                f"{name} beside {file.shown} would be imported in the place of this package.\n"
                "Give it another name, or write all the same with --force."
            )
        if _PACKAGES & {*path.parts, *path.resolve().parts}:
            raise OutputError(
                f"{file.shown} belongs to an installed package.\n"
                "Apply the diff to a copy of your own, or write all the same with --force."
            )
        if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:  # which does not keep root from it
            raise OutputError(
                f"{file.shown} is write-protected.\nChange its permissions, or write all the same with --force."
            )
        if _is_dirty(path):
            raise OutputError(
                f"{file.shown} has changes that are not committed: --write would mix its own with them.\n"
                "Commit or stash them first, or write all the same with --force."
            )


def write(files: Sequence[Edited]) -> list[tuple[str, str]]:
    """Write every file and return the (file, backup) pairs; after an error all are as they were.

    Raises:
        OutputError: a file is no longer what was read, or cannot be written.
    """
    forms = [_form(file) for file in files]
    backups: list[tuple[Edited, Path]] = []
    written: list[tuple[Path, bytes, str]] = []
    try:
        for file in files:
            backups.append((file, _back_up(file)))  # noqa: PERF401 (those made stay known when one fails)
        for file, (newline, encoding) in zip(files, forms, strict=True):
            path = Path(file.name)
            old = path.read_bytes()
            written.append((path, old, encoding))
            write_text(path, file.after.replace("\n", newline), force=True, encoding=encoding)
    except BaseException:
        for path, old, encoding in written:
            if path.read_bytes() != old:
                write_text(path, old.decode(encoding), force=True, encoding=encoding)
        for _, backup in backups:
            backup.unlink()
        raise
    return [(file.shown, os.path.relpath(backup, os.getcwd())) for file, backup in backups]


def _form(file: Edited) -> tuple[str, str]:
    """How the file's lines end, and its encoding; an error where it is not what was read."""
    path = Path(file.name)
    try:
        held = path.read_bytes()
    except OSError as error:
        raise OutputError(f"{file.shown} cannot be read: {error.strerror or error}.") from error
    try:
        text, encoding = decoded(held)
    except (SyntaxError, UnicodeDecodeError):
        text, encoding = "", ""
    if not encoding or text.replace("\r\n", "\n") != file.before:
        raise OutputError(
            f"{file.shown} was changed while it was measured: what was proved is not what stands there now.\n"
            "Nothing was written; run gradscope fix again."
        )
    ends = held.count(b"\r\n")
    if ends and ends != held.count(b"\n"):
        raise OutputError(f"{file.shown} mixes two kinds of line ends.\nApply the diff by hand, or make them one kind.")
    return "\r\n" if ends else "\n", encoding


def _back_up(file: Edited) -> Path:
    """A copy beside the file, never in the place of another."""
    source = Path(file.name)
    number = 0
    while True:
        backup = source.with_name(f"{source.name}.bak{number or ''}")
        try:
            handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise OutputError(
                f"{file.shown} cannot be backed up as {backup.name}: {error.strerror or error}.\nNothing was written."
            ) from error
        try:
            with os.fdopen(handle, "wb") as copy:
                copy.write(source.read_bytes())
            shutil.copymode(source, backup)
        except BaseException:
            backup.unlink()
            raise
        return backup


def _is_dirty(path: Path) -> bool:
    """Check that git holds another version of the file, or none; a file outside of git has nothing to be mixed with."""
    command = ["git", "-C", str(path.resolve().parent), "status", "--porcelain", "--", path.resolve().name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return False
    return bool(done.stdout.strip())
