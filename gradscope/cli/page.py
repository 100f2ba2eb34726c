"""Writing the interactive page from the command line: where it goes, its link on the terminal, and opening it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gradscope.cli.failure import say
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.report import Report


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
