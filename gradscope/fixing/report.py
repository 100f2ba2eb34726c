"""What ``gradscope fix`` hands on: to print, save, and write into the user's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradscope.errors import OutputError
from gradscope.fixing.result import FIX_HEAD, FixData, to_json
from gradscope.patching.edit.imports import INSTALLED, hides_gradscope
from gradscope.patching.edit.source import decoded
from gradscope.report import Report
from gradscope.report.outfile import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from gradscope.document.parts import Document


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
        if INSTALLED & {*path.parts, *path.resolve().parts}:
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


# In what the profiles before and after differ by what was replaced between them: model, batch and machine are the same.
_OF_A_FIX = frozenset({"input shapes", "calls a step by layer"})

_APART = (
    "flame, tables and cards are of two profiles, made one after the other; the tab Fix has what was measured in "
    "alternation, which alone decides"
)

# A line that patch and git pass over, by which a diff of ours is known.
DIFF_HEAD = re.compile(r"gradscope fix of ")


class FixReport:
    """A fix: ``data`` is what FIX.json holds, ``before`` and ``after`` are the profiles, ``files`` what would change.

    ``print(report)`` shows it.
    """

    def __init__(self, data: FixData, before: Report | None, after: Report | None, files: Sequence[Edited]) -> None:
        self.data, self.before, self.after, self.files = data, before, after, tuple(files)

    def __repr__(self) -> str:
        return f"<gradscope fix of {self.data.workload.target!r}: {len(self.data.kept)} of {len(self.data.sites)} kept>"

    def __str__(self) -> str:
        """The report as it is printed, 100 columns wide and without colour."""
        from gradscope.document.terminal import to_text

        return to_text(self.document())

    def document(self, diff: str | os.PathLike[str] | None = None) -> Document:
        """What is shown, before it is known where; ``diff`` is where :meth:`save_diff` wrote."""
        from gradscope.fixing.document import fix_document

        return fix_document(self.data, None if diff is None else str(diff))

    def print(self, console: Console | None = None, diff: str | os.PathLike[str] | None = None) -> None:
        """Print on a rich ``console``, by default on stdout; ``diff`` is where :meth:`save_diff` wrote."""
        from gradscope.document.terminal import print_document

        print_document(self.document(diff), console)

    def to_json(self) -> str:
        """The fix as FIX.json's text."""
        return to_json(self.data)

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write FIX.json, whole or not at all; raises :class:`~gradscope.errors.OutputError` where that cannot be."""
        return write_text(path, self.to_json(), FIX_HEAD, force)

    def save_diff(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write the diff for ``patch -p1``, below one line that says what it is; errors as of :meth:`save`."""
        return write_text(path, f"gradscope fix of {self.data.workload.target}\n{self.data.diff}", DIFF_HEAD, force)

    def to_html(self, path: str | os.PathLike[str], source: bool = True, force: bool = False) -> Path | None:
        """Write the page: what was replaced, its proof and its diff, beside the profiles before and after.

        None where nothing was kept, and there is no second profile. ``source=False`` leaves the text of source lines
        out, and with it the diff. Errors as of :meth:`save`.
        """
        if self.before is None or self.after is None:
            return None
        from gradscope.compare import diff
        from gradscope.compare.page import comparison_html
        from gradscope.document.record import to_record
        from gradscope.report.page import HTML_HEAD

        comparison = diff(self.before, self.after).data
        others = tuple(each for each in comparison.mismatches if each.what not in _OF_A_FIX)
        fix = {"sections": to_record(self.document()), "diff": self.data.diff if source else ""}
        notes = (*comparison.notes, _APART)
        page = comparison_html(replace(comparison, mismatches=others, notes=notes), source, fix)
        return write_text(path, page, HTML_HEAD, force)

    def write(self) -> list[tuple[str, str]]:
        """Change the user's files as the diff shows; returns (file, backup) pairs.

        Raises:
            OutputError: a file is not what was read, or cannot be written; then all are as they were.
        """
        written = write(self.files)
        self.data = replace(self.data, written=tuple(name for name, _ in written))
        return written
