"""What ``gradscope fix`` hands on: to print, save, and write into the user's files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradscope.fixing.fixfile import FIX_HEAD, to_json
from gradscope.fixing.result import FixData
from gradscope.fixing.writing import Edited, write
from gradscope.report import Report
from gradscope.report.outfile import write_text

if TYPE_CHECKING:
    from rich.console import Console

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
        from gradscope.fixing.show import to_text

        return to_text(self.data)

    def print(self, console: Console | None = None, diff: str | os.PathLike[str] | None = None) -> None:
        """Print on a rich ``console``, by default on stdout; ``diff`` is where :meth:`save_diff` wrote."""
        from gradscope.fixing.show import print_fix

        print_fix(self.data, console, None if diff is None else str(diff))

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
        """Write the page that compares the two profiles; None where nothing was kept and there is no second one."""
        if self.before is None or self.after is None:
            return None
        from gradscope.compare import diff

        return diff(self.before, self.after).to_html(path, source=source, force=force)

    def write(self) -> list[tuple[str, str]]:
        """Change the user's files as the diff shows; returns (file, backup) pairs.

        Raises:
            OutputError: a file is not what was read, or cannot be written; then all are as they were.
        """
        written = write(self.files)
        self.data = replace(self.data, written=tuple(name for name, _ in written))
        return written
