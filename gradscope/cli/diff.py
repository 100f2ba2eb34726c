"""``gradscope diff``: what changed from one run to another."""

from __future__ import annotations

import re
import sys
import webbrowser
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.failure import say
from gradscope.cli.options import Color, ColorOption, ForceOption, NoSourceOption
from gradscope.cli.streams import link, reader_may_leave, write_json
from gradscope.errors import UsageError
from gradscope.safe_text import local_path, shown_path

if TYPE_CHECKING:
    from gradscope.compare import Diff


class DiffFormat(str, Enum):
    """What a comparison can be turned into."""

    terminal = "terminal"
    json = "json"
    markdown = "markdown"
    html = "html"


class DiffSort(str, Enum):
    """Order of layers in a comparison."""

    step = "step"
    backward = "backward"
    forward = "forward"
    ratio = "ratio"
    memory = "memory"


_REPORT = "Report"
_NOT_KNOWABLE = re.compile(r"(?!)")  # nothing tells a text that we wrote from somebody else's


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.json", help="A file written by gradscope profile.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER.json", help="Another one, to compare with it.")],
    format: Annotated[DiffFormat, typer.Option("--format", "-f", help="Output format.")] = DiffFormat.terminal,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE instead of stdout.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT.html", help="Also write the interactive HTML page that compares the runs."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the HTML page in a browser.")] = False,
    no_source: NoSourceOption = False,
    force: ForceOption = False,
    sort: Annotated[
        DiffSort | None,
        typer.Option("--sort", help="Sort layers by their effect on this; step by default.", rich_help_panel=_REPORT),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Rows per table; 20 by default.", rich_help_panel=_REPORT),
    ] = None,
    min_percent: Annotated[
        float | None,
        typer.Option(
            "--min-percent",
            min=0,
            max=100,
            help="Collapse changes below this percentage of the step; 0.1 by default.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    within_noise: Annotated[
        bool,
        typer.Option("--all", help="Also list layers whose change is within noise.", rich_help_panel=_REPORT),
    ] = False,
    color: ColorOption = Color.auto,
) -> None:
    """Compare two runs: which layers changed in time and memory, beyond noise.

    A change in time counts where it exceeds the step-to-step variation of both
    runs; bytes are exact. Runs of different machines, versions or settings are
    compared with a warning.
    """
    given: dict[str, Any] = {
        "sort": None if sort is None else sort.value,
        "top": top,
        "min_percent": min_percent,
        "within_noise": within_noise or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if options and format in (DiffFormat.json, DiffFormat.html):
        option = "all" if "within_noise" in options else next(iter(options)).replace("_", "-")
        raise UsageError(f"--{option} is for what is read by people: {format.value} always holds every layer.")
    page = _page_path(format, output, html)
    if page is None and (open_it or no_source):
        raise UsageError(f"{'--open' if open_it else '--no-source'} is for a page: add --html OUT.html.")
    from gradscope.compare import diff as compare

    before, after = Path(local_path(before)), Path(local_path(after))
    output = None if output is None else Path(local_path(output))

    found = compare(before, after)
    if page is not None:
        _write_page(found, page, source=not no_source, force=force, open_it=open_it)
    if format is DiffFormat.html:
        return
    if output is not None:
        from gradscope.compare.difffile import DIFF_HEAD
        from gradscope.report.outfile import write_text

        head = DIFF_HEAD if format is DiffFormat.json else _NOT_KNOWABLE
        write_text(output, _text(found, format, options), head, force=force)
        say(f"wrote {shown_path(output)}")
        return
    with reader_may_leave(sys.stdout):
        if format is DiffFormat.terminal:
            from gradscope.document.terminal import make_console

            found.print(make_console(sys.stdout, color.wanted), **options)
        else:
            text = _text(found, format, options)
            write_json(sys.stdout, text) if format is DiffFormat.json else sys.stdout.write(text)


def _page_path(format: DiffFormat, output: Path | None, html: Path | None) -> Path | None:
    """Where the page goes; ``None`` where none is asked for."""
    if format is not DiffFormat.html:
        return html
    if output is not None and html is not None:
        raise UsageError("-o and --html both say where the page goes: leave one out.")
    if output is None and html is None:
        raise UsageError("--format html needs a place for the page: add -o OUT.html.")
    return output or html


def _write_page(found: Diff, path: Path, *, source: bool, force: bool, open_it: bool) -> None:
    written = found.to_html(path, source=source, force=force)
    say(f"wrote {link(written, sys.stderr)}")
    if open_it and not webbrowser.open(written.resolve().as_uri()):
        say(f"no browser could be started: open {shown_path(written)} yourself")


def _text(found: Diff, format: DiffFormat, options: dict[str, Any]) -> str:
    if format is DiffFormat.json:
        return found.to_json()
    if format is DiffFormat.markdown:
        return found.to_markdown(**options)
    from gradscope.document.terminal import to_text

    return to_text(found.document(**options))
