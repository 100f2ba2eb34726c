"""``gradscope show``: print a finished run again, or export it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.failure import say
from gradscope.cli.options import (
    Color,
    ColorOption,
    DepthOption,
    ForceOption,
    FullOption,
    IgnoreOption,
    MinPercentOption,
    ShowOption,
    SortOption,
    TopOption,
    ignored_rules,
    view_options,
)
from gradscope.cli.streams import beside, reader_may_leave, write_json, write_page
from gradscope.errors import UsageError
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.report import Report


class ShowFormat(str, Enum):
    """What a run can be turned into."""

    terminal = "terminal"
    json = "json"
    csv = "csv"
    markdown = "markdown"
    speedscope = "speedscope"
    perfetto = "perfetto"
    html = "html"


class CsvTable(str, Enum):
    """Tables of a run, for CSV."""

    layers = "layers"
    lines = "lines"
    ops = "ops"
    kernels = "kernels"
    findings = "findings"
    memory = "memory"
    saved = "saved"
    held = "held"
    copies = "copies"
    retained = "retained"
    timeline = "timeline"
    phases = "phases"
    ledger = "ledger"


# Formats that show a choice of layers; the others hold all of them.
_CHOOSING = (ShowFormat.terminal, ShowFormat.markdown)
# Formats that people read; the others are for programs.
_READ = (*_CHOOSING, ShowFormat.html)

_JSON = (ShowFormat.json, ShowFormat.speedscope, ShowFormat.perfetto)

# Nothing tells a text that we wrote from somebody else's: matches no beginning but that of an empty file.
_NOT_KNOWABLE = re.compile(r"(?!)")
_PERFETTO_HEAD = re.compile(r'\s*\{\s*"exporter":\s*"gradscope ')
_SPEEDSCOPE_HEAD = re.compile(r'\s*\{\s*"\$schema":\s*"[^"]*",\s*"exporter":\s*"gradscope ')


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="A file that gradscope profile wrote.")],
    format: Annotated[ShowFormat, typer.Option("--format", "-f", help="What to make of it.")] = ShowFormat.terminal,
    table: Annotated[
        CsvTable | None, typer.Option("--table", help="Which table, with --format csv; layers by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE instead of stdout.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser, with --format html.")] = False,
    no_source: Annotated[
        bool, typer.Option("--no-source", help="Leave the text of source lines out, with --format html.")
    ] = False,
    force: ForceOption = False,
    depth: DepthOption = None,
    sort: SortOption = None,
    top: TopOption = None,
    min_percent: MinPercentOption = None,
    full: FullOption = False,
    show_sections: ShowOption = None,
    ignore: IgnoreOption = None,
    color: ColorOption = Color.auto,
) -> None:
    """Print RUN.json as gradscope profile did, or export it.

    csv is one table, speedscope a flame graph for https://www.speedscope.app,
    perfetto the step over time for https://ui.perfetto.dev, markdown a text for a pull request,
    html the interactive page (beside RUN.json unless -o says where), json the run itself.
    """
    view = view_options(depth, sort, top, min_percent, full, show_sections)
    _check(format, table, view)
    if ignore and format not in _READ:
        raise UsageError(f"--ignore is for what is read by people: {format.value} always holds every finding.")
    left_out = ignored_rules(ignore) if format in _READ else ()
    if format is not ShowFormat.html and (open_it or no_source):
        raise UsageError(f"{'--open' if open_it else '--no-source'} is for --format html, not for {format.value}.")
    from gradscope.report import load

    report = load(run)
    kept = tuple(one for one in report.data.findings if one.rule not in left_out)
    looked = None if report.data.rules is None else max(report.data.rules - len(set(left_out)), 0)
    report.data = replace(report.data, findings=kept, rules=looked)
    if format is ShowFormat.html:
        write_page(report, output or beside(run), source=not no_source, force=force, open_it=open_it)
        return
    if output is not None:
        from gradscope.report.outfile import write_text

        write_text(output, _text(report, format, table, view), _head(format), force=force)
        say(f"wrote {shown_path(output)}")
        return
    with reader_may_leave(sys.stdout):
        if format is ShowFormat.terminal:
            from gradscope.document.terminal import make_console

            report.print(make_console(sys.stdout, color.wanted), **view)
        else:
            text = _text(report, format, table, view)
            write_json(sys.stdout, text) if format in _JSON else sys.stdout.write(text)


def _check(format: ShowFormat, table: CsvTable | None, view: dict[str, Any]) -> None:
    if table is not None and format is not ShowFormat.csv:
        raise UsageError(f"--table is for --format csv, not for {format.value}, which holds all tables.")
    if view and format not in _CHOOSING:
        option = f"--{next(iter(view)).replace('_', '-')}"
        raise UsageError(f"{option} is for what is read by people: {format.value} always holds every layer.")


def _text(report: Report, format: ShowFormat, table: CsvTable | None, view: dict[str, Any]) -> str:
    if format is ShowFormat.json:
        return report.to_json()
    if format is ShowFormat.csv:
        return report.to_csv((table or CsvTable.layers).value)
    if format is ShowFormat.markdown:
        return report.to_markdown(**view)
    if format is ShowFormat.speedscope:
        return report.to_speedscope()
    if format is ShowFormat.perfetto:
        return report.to_perfetto()
    from gradscope.document.terminal import to_text

    return to_text(report.document(**view))


def _head(format: ShowFormat) -> re.Pattern[str]:
    from gradscope.report.outfile import RUN_HEAD

    heads = {
        ShowFormat.json: RUN_HEAD,
        ShowFormat.speedscope: _SPEEDSCOPE_HEAD,
        ShowFormat.perfetto: _PERFETTO_HEAD,
    }
    return heads.get(format, _NOT_KNOWABLE)
