"""What becomes of a report: it is printed, and written as RUN.json and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gradscope.cli.failure import note_kept, say
from gradscope.cli.streams import reader_may_leave, write_json, write_page
from gradscope.errors import OutputError
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.report import Report


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Where a report goes, and how it looks."""

    json_path: Path | None  # None: the JSON goes to stdout, and nothing else does
    html_path: Path | None  # None: no page
    source: bool  # the page holds the text of source lines
    open_page: bool
    force: bool
    view: dict[str, Any]
    color: bool | None
    quiet: bool
    printed: bool = True  # False: files alone, as of a rank that is not the first


def deliver(report: Report, request: Delivery, stream: TextIO) -> None:
    """Print the report and write its files; what can be written is, whatever else fails.

    Raises:
        OutputError: a file, or the stream, cannot be written.
    """
    if request.json_path is None:
        with reader_may_leave(stream):
            write_json(stream, report.to_json())
        note_kept(f"the JSON on stdout ({_steps(report)})")
        _write_page(report, request)
        return
    from gradscope.document.terminal import make_console

    unwritten: OutputError | None = None
    try:
        report.save(request.json_path, force=request.force)  # first: the report names the file
        note_kept(f"{shown_path(request.json_path)} ({_steps(report)})")
    except OutputError as error:
        unwritten = error
    unprinted: OutputError | None = None
    try:
        if request.printed:
            with reader_may_leave(stream, beside_files=unwritten is None):
                report.print(make_console(stream, request.color), **request.view)
    except OutputError as error:  # the files are worth all the more
        unprinted = error
    if unwritten is not None:
        raise unwritten
    if not request.quiet:
        say(f"wrote {shown_path(request.json_path)}")
    _write_page(report, request)
    if unprinted is not None:
        raise unprinted


def _write_page(report: Report, request: Delivery) -> None:
    if request.html_path is None:
        return
    write_page(
        report,
        request.html_path,
        source=request.source,
        force=request.force,
        open_it=request.open_page,
        quiet=request.quiet,
    )
    note_kept(shown_path(request.html_path))


def _steps(report: Report) -> str:
    steps = report.data.workload.steps
    return f"{steps} measured step{'' if steps == 1 else 's'}"
