"""``gradscope profile``: measure, print the report, write RUN.json and RUN.html."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from gradscope.cli.deliver import Delivery, deliver
from gradscope.cli.failure import raising_on_terminate, say, say_error, say_loading, show_user_error
from gradscope.cli.options import (
    SCRIPT_ARGS,
    Color,
    ColorOption,
    DepthOption,
    DeviceOption,
    ForceOption,
    FullOption,
    IgnoreOption,
    MemoryBudgetOption,
    MinPercentOption,
    ModuleOption,
    NoHtmlOption,
    NoLinesOption,
    NoMemoryOption,
    NoSourceOption,
    QuietOption,
    SeedOption,
    ShowOption,
    SortOption,
    StepsOption,
    TargetArgument,
    TopOption,
    WarmupOption,
    html_path_of,
    ignored_rules,
    json_path_of,
    memory_budget,
    of_rank,
    refuse_launcher,
    refuse_leftovers,
    renamed,
    shown_target,
    view_options,
)
from gradscope.cli.streams import reader_may_leave, report_stream, restore_streams
from gradscope.errors import GradscopeError, NothingMeasuredError, Terminated, UsageError
from gradscope.process import local_ranks, rank_of_process, room_for_files
from gradscope.safe_text import shown_path

if TYPE_CHECKING:
    from gradscope.pipeline import Outcome
    from gradscope.tables import Options
    from gradscope.workload import Script, Workload


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(Delivery):
    """One ``gradscope profile``, as asked for."""

    target: str
    args: tuple[str, ...]
    module: bool
    options: Options
    ranks: tuple[Path, ...] = ()  # of the first of several ranks: the RUN.json of each on this machine


def profile(
    context: typer.Context,
    target: TargetArgument,
    module: ModuleOption = False,
    steps: StepsOption = 5,
    warmup: WarmupOption = 3,
    device: DeviceOption = "auto",
    seed: SeedOption = None,
    no_lines: NoLinesOption = False,
    no_memory: NoMemoryOption = False,
    budget: MemoryBudgetOption = None,
    run_to_end: Annotated[
        bool, typer.Option("--run-to-end", help="Run a script to its end, not only the measured steps.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="PREFIX", help="Write PREFIX.json and PREFIX.html; gradscope-<target> by default."
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write RUN.json to PATH; - prints it instead of the report."),
    ] = None,
    html_path: Annotated[
        str | None, typer.Option("--html", metavar="PATH", help="Write the interactive HTML page to PATH.")
    ] = None,
    no_html: NoHtmlOption = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the HTML page in a browser.")] = False,
    no_source: NoSourceOption = False,
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
    """Profile the backward pass of TARGET: time and memory by layer and by source line.

    TARGET is a file that defines workload() -> (model, batch), or any
    training script, unmodified; arguments after -- are passed to it. Progress
    goes to stderr, the report to stdout.
    """
    refuse_leftovers(context, target, module)
    refuse_launcher(target, context.meta.get(SCRIPT_ARGS, ()), module=module, command="profile")
    from gradscope.tables import Options

    run_path = json_path_of(target, output, json_path, module=module)
    page_path = html_path_of(run_path, html_path, no_html=no_html)
    ranks = rank_of_process()
    others: tuple[Path, ...] = ()
    if ranks is not None:
        if run_path is None:
            raise UsageError(f"{ranks[1]} ranks cannot all write to stdout: give -o PREFIX instead of --json -.")
        if ranks[0] == 0:
            others = tuple(of_rank(run_path, rank) for rank in local_ranks(*ranks))
        run_path, page_path = (None if path is None else of_rank(path, ranks[0]) for path in (run_path, page_path))
        quiet, open_page = quiet or ranks[0] > 0, open_page and ranks[0] == 0
    if page_path is None and open_page:
        raise UsageError("--open has no page to open: leave out --no-html, or give --html PATH.")
    request = ProfileRequest(
        target=target,
        args=tuple(context.meta.get(SCRIPT_ARGS, ())),
        module=module,
        options=Options(
            steps=steps,
            warmup=warmup,
            device=device,
            seed=seed,
            lines=not no_lines,
            memory=not no_memory,
            # A rank that stopped by itself would leave the others waiting for it.
            run_to_end=run_to_end or ranks is not None,
            ignore=ignored_rules(ignore),
            memory_budget=memory_budget(budget),
        ),
        json_path=run_path,
        html_path=page_path,
        source=not no_source,
        open_page=open_page,
        force=force,
        view=view_options(depth, sort, top, min_percent, full, show_sections),
        color=color.wanted,
        quiet=quiet,
        printed=ranks is None or ranks[0] == 0,
        ranks=others,
    )
    raise typer.Exit(run(request, whole_process=bool(context.obj)))


def run(request: ProfileRequest, *, whole_process: bool) -> int:
    """Do what was asked for and return the exit code.

    Raises:
        GradscopeError: the request cannot be met; before anything of the user's has run if that can be known.
    """
    from gradscope.report.outfile import check_output

    if request.json_path is not None:
        check_output(request.json_path, force=request.force)
    if request.html_path is not None:
        from gradscope.report.page import HTML_HEAD

        check_output(request.html_path, HTML_HEAD, force=request.force)
    say_loading(shown_target(request.target, module=request.module), quiet=request.quiet)
    began = time.time()
    with report_stream(exclusive=request.json_path is None, whole_process=whole_process) as stream:
        try:
            loaded = _load(request)
        except GradscopeError:
            raise
        except BaseException as error:
            return show_user_error(error)
        try:
            outcome = _measure(loaded, request)
        except NothingMeasuredError as error:
            if rank_of_process() is None:
                raise
            restore_streams()
            say_error(str(error))  # of a rank that trains less than others: its end is not to end them
            if request.json_path is not None:
                from gradscope.ranks.gather import nothing_comes

                nothing_comes(request.json_path)
            return 0
        restore_streams()
        request = _of_its_rank(request, outcome)
        if outcome.report is not None:
            with room_for_files():
                out = sys.stdout if stream.closed else stream
                deliver(outcome.report, request, out)
                if len(request.ranks) > 1 and outcome.error is None:
                    _report_ranks(request, began, out)
    return _exit_code(outcome, shown_target(request.target, module=request.module))


def _of_its_rank(request: ProfileRequest, outcome: Outcome) -> ProfileRequest:
    """The request with files of the rank's own, where the program made its process group without ``torchrun``."""
    if rank_of_process() is not None or outcome.report is None or request.json_path is None:
        return request
    about = outcome.report.data.environment
    rank = about.get("rank")
    if not isinstance(rank, int) or int(about.get("world_size", 1)) < 2:
        return request
    page = None if request.html_path is None else of_rank(request.html_path, rank)
    return replace(
        request,
        json_path=of_rank(request.json_path, rank),
        html_path=page,
        open_page=request.open_page and rank == 0,
        printed=rank == 0,
        quiet=request.quiet or rank > 0,
    )


def _report_ranks(request: ProfileRequest, began: float, stream: TextIO) -> None:
    """Print what differs between the ranks, behind the first one's report, once all have written theirs."""
    from gradscope.document.parts import Document, KeyValues
    from gradscope.document.terminal import make_console, print_document
    from gradscope.ranks import ranks_sections
    from gradscope.ranks.gather import gathered

    merged, missing = gathered(request.ranks, began)
    if missing:
        say(f"no report came of {', '.join(shown_path(path) for path in missing)}: gradscope merge compares what comes")
    if merged is None:
        return
    with reader_may_leave(stream, beside_files=True):
        document = Document("", "", KeyValues(()), ranks_sections(merged))
        print_document(document, make_console(stream, request.color))


def _load(request: ProfileRequest) -> Workload | Script:
    from gradscope.workload import load_target

    loaded = load_target(
        request.target,
        request.args,
        module=request.module,
        device=request.options.device,
        seed=request.options.seed,
    )
    # Not before: a script sees its path in sys.argv as it was typed.
    return renamed(loaded, shown_target(loaded.target or request.target, module=request.module))


def _measure(loaded: Workload | Script, request: ProfileRequest) -> Outcome:
    from gradscope import pipeline
    from gradscope.cli.progress import make_progress
    from gradscope.workload import Script

    # A script writes to the terminal as well: a line of ours that is drawn again and again would garble its own.
    progress = make_progress(quiet=request.quiet, live=not isinstance(loaded, Script))
    try:
        with raising_on_terminate():
            if isinstance(loaded, Script):
                return pipeline.profile_script(loaded, request.options, progress)
            return pipeline.profile_workload(loaded, request.options, progress)
    finally:
        progress.done()


def _exit_code(outcome: Outcome, target: str) -> int:
    error = outcome.error
    if isinstance(error, GradscopeError):
        raise error
    code = 0 if error is None else show_user_error(error)
    if outcome.report is not None or isinstance(error, KeyboardInterrupt | Terminated):
        return code
    if code == 0 and rank_of_process() is not None:
        say_error(f"{target} left before one step was measured: there is nothing to report.")
        return code
    if code == 0:
        raise NothingMeasuredError(
            f"{target} left before one step was measured: there is nothing to report.\n"
            "Let it train for more steps, or measure less: --warmup 1 --steps 2."
        )
    say_error(f"nothing was measured: {target} ended before the measured steps.")
    return code
