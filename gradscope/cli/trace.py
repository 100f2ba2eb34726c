"""``gradscope trace``: a report of traces that torch.profiler exported, from any device and rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.deliver import Delivery, deliver
from gradscope.cli.failure import say_error, say_loading, show_user_error
from gradscope.cli.options import (
    Color,
    ColorOption,
    DepthOption,
    ForceOption,
    FullOption,
    IgnoreOption,
    MinPercentOption,
    NoHtmlOption,
    QuietOption,
    ShowOption,
    SortOption,
    TopOption,
    html_path_of,
    ignored_rules,
    json_path_of,
    view_options,
)
from gradscope.errors import GradscopeError, TraceFileError, UsageError
from gradscope.process import room_for_files
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.report import Report
    from gradscope.workload import Workload

_ENDINGS = (".gz", ".json", ".trace", ".pt")  # of names as torch's own handlers give them


def trace(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Traces that torch.profiler exported: .json or .json.gz.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="TARGET",
            help="The model that was traced, for its layers' names: model.py, model.py:name or package.module:name.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A-B", help="Steps that count, by their numbers in the trace.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="PREFIX", help="Write PREFIX.json and PREFIX.html, of one FILE."),
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write RUN.json to PATH, or to stdout with -.")
    ] = None,
    html_path: Annotated[str | None, typer.Option("--html", metavar="PATH", help="Write the page to PATH.")] = None,
    no_html: NoHtmlOption = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
    depth: DepthOption = None,
    sort: SortOption = None,
    top: TopOption = None,
    min_percent: MinPercentOption = None,
    full: FullOption = False,
    show_sections: ShowOption = None,
    ignore: IgnoreOption = None,
    color: ColorOption = Color.auto,
) -> None:
    """Attribute a trace that torch.profiler exported: device and host time by layer, or by operation.

    Record it with torch.profiler.profile(with_stack=True, record_shapes=True), prof.step() after each step, and
    prof.export_chrome_trace("trace.json.gz"). Each FILE gives a report, a RUN.json and a page; one that cannot be read
    is reported, and the others are read all the same.
    """
    if len(files) > 1 and (output is not None or json_path is not None or html_path is not None):
        option = "-o" if output is not None else "--json" if json_path is not None else "--html"
        raise UsageError(f"{option} names the output of one FILE, and {len(files)} are given.")
    view = view_options(depth, sort, top, min_percent, full, show_sections)
    ignored = ignored_rules(ignore)
    from gradscope.chrome.run import steps_of

    chosen = None if steps is None else steps_of(steps)
    requests = [
        _request(file, output, json_path, html_path, no_html, open_page, force, view, color, quiet) for file in files
    ]
    repeated = [one.json_path for one in requests if one.json_path is not None]
    if len(set(repeated)) < len(repeated):
        raise UsageError("two of these FILEs have the same name: give each -o PREFIX of its own, one at a time.")
    from gradscope.report.outfile import check_output

    inputs = {file.resolve() for file in files}
    for request in requests:
        for path in (request.json_path, request.html_path):
            if path is not None and path.resolve() in inputs:
                raise UsageError(f"{shown_path(path)} is a FILE that is read: write to another with -o PREFIX.")
        if request.json_path is not None:
            check_output(request.json_path, force=force)
    workload = None if model is None else _load(model, quiet=quiet)
    delivered = 0
    for file, request in zip(files, requests, strict=True):
        report = _read(file, workload, chosen, ignored, quiet=quiet)
        if report is None:
            continue
        if delivered and request.json_path is not None:
            sys.stdout.write("\n")
        with room_for_files():
            deliver(report, request, sys.stdout)
        delivered += 1
    if delivered < len(files):
        raise typer.Exit(TraceFileError.exit_code)


def _read(
    file: Path, model: Workload | None, steps: tuple[int, int] | None, ignored: tuple[str, ...], *, quiet: bool
) -> Report | None:
    """Read a FILE; where it cannot be read say why and return None, for the others may be whole."""
    from gradscope.chrome.run import read_trace
    from gradscope.cli.progress import make_progress

    progress = make_progress(quiet=quiet, live=True)
    try:
        return read_trace(file, model=model, steps=steps, ignore=ignored, progress=progress)
    except TraceFileError as error:
        progress.done()
        say_error(str(error))
        return None
    except GradscopeError:
        raise
    except Exception as error:
        if model is None:
            raise
        progress.done()
        raise typer.Exit(show_user_error(error)) from error  # the model that is run for its names
    finally:
        progress.done()


def _request(
    file: Path,
    output: str | None,
    json_path: str | None,
    html_path: str | None,
    no_html: bool,
    open_page: bool,
    force: bool,
    view: dict[str, Any],
    color: Color,
    quiet: bool,
) -> Delivery:
    run_path = json_path_of(_stem(file), output, json_path, module=False)
    page_path = html_path_of(run_path, html_path, no_html=no_html)
    if page_path is None and open_page:
        raise UsageError("--open has no page to open: leave out --no-html, or give --html PATH.")
    return Delivery(
        json_path=run_path,
        html_path=page_path,
        source=False,
        open_page=open_page,
        force=force,
        view=view,
        color=color.wanted,
        quiet=quiet,
    )


def _stem(file: Path) -> str:
    """``rank0`` for ``rank0.pt.trace.json.gz``; a dot within would be taken for the end of a module's name."""
    name = file.name
    while name.endswith(_ENDINGS):
        name = name[: name.rindex(".")]
    return (name or "trace").replace(".", "-")


def _load(target: str, *, quiet: bool) -> Workload:
    from gradscope.workload import Workload, load_target

    say_loading(target, quiet=quiet)
    loaded = load_target(target, device="cpu")
    if not isinstance(loaded, Workload):
        raise UsageError(
            f"--model {shown_path(target)} is a script: give a file that defines workload() -> (model, batch), "
            "whose model is the one that was traced."
        )
    return loaded
