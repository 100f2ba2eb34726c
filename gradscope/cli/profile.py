"""``gradscope profile``: measure, print the report, write RUN.json and RUN.html."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from gradscope.cli.failure import say, say_error, show_user_error
from gradscope.cli.options import (
    Color,
    ColorOption,
    DepthOption,
    ForceOption,
    MinPercentOption,
    SortOption,
    TopOption,
    view_options,
)
from gradscope.cli.page import beside, write_page
from gradscope.cli.streams import reader_may_leave, report_stream
from gradscope.errors import GradscopeError, NothingMeasuredError, OutputError, UsageError

if TYPE_CHECKING:
    from gradscope.pipeline import Outcome
    from gradscope.report import Report
    from gradscope.tables import Options
    from gradscope.workload import Script, Workload

SCRIPT_ARGS = "gradscope.args"  # of the context: what follows --


class TargetCommand(TyperCommand):
    """A command whose arguments after ``--`` belong to the target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is before ``--``; what is after it goes into ``ctx.meta`` untouched."""
        own, after = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[SCRIPT_ARGS] = after
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line with the part that the parser does not know of."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]..."]


@dataclass(frozen=True)
class Request:
    """One ``gradscope profile``, as asked for."""

    target: str
    args: tuple[str, ...]
    module: bool
    options: Options
    json_path: Path | None  # None: the JSON goes to stdout, and nothing else does
    html_path: Path | None  # None: no page
    source: bool  # whether the page holds the text of source lines
    open_page: bool
    force: bool
    view: dict[str, Any]
    color: bool | None
    quiet: bool


def profile(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="model.py, model.py:name, package.module:name, or a training script."),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="TARGET is a module to run as a script, as with python -m.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to measure.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before anything is measured.")] = 3,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu or cuda: where a model file's model runs.")
    ] = "auto",
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of Python, NumPy and torch.")] = None,
    no_lines: Annotated[bool, typer.Option("--no-lines", help="Do not measure by source line.")] = False,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Do not measure memory.")] = False,
    run_to_end: Annotated[
        bool, typer.Option("--run-to-end", help="Let a script go on after the measured steps.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="PREFIX", help="Write PREFIX.json and .html; gradscope-<target> by default."
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write RUN.json to PATH; - is stdout, without a report."),
    ] = None,
    html_path: Annotated[
        str | None, typer.Option("--html", metavar="PATH", help="Write the interactive page to PATH.")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Do not write the page.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    no_source: Annotated[
        bool, typer.Option("--no-source", help="Leave the text of source lines out of the page.")
    ] = False,
    force: ForceOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    depth: DepthOption = None,
    sort: SortOption = None,
    top: TopOption = None,
    min_percent: MinPercentOption = None,
    color: ColorOption = Color.auto,
) -> None:
    """Measure where the backward pass of TARGET goes, layer by layer and line by line.

    TARGET is a file that defines workload() -> (model, batch), or any
    training script, unedited; what follows -- is given to it. Progress goes
    to stderr, the report to stdout.
    """
    _refuse_leftovers(context, target, module)
    from gradscope.tables import Options

    run_path = _json_path(target, output, json_path, module=module)
    page_path = _html_path(run_path, html_path, no_html=no_html)
    if page_path is None and open_page:
        raise UsageError("--open has no page to open: leave out --no-html, or give --html PATH.")
    request = Request(
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
            run_to_end=run_to_end,
        ),
        json_path=run_path,
        html_path=page_path,
        source=not no_source,
        open_page=open_page,
        force=force,
        view=view_options(depth, sort, top, min_percent),
        color=color.wanted,
        quiet=quiet,
    )
    raise typer.Exit(run(request, whole_process=bool(context.obj)))


def run(request: Request, *, whole_process: bool) -> int:
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
    with report_stream(exclusive=request.json_path is None, whole_process=whole_process) as stream:
        try:
            loaded = _load(request)
        except GradscopeError:
            raise
        except BaseException as error:
            return show_user_error(error)
        outcome = _measure(loaded, request)
        if outcome.report is not None:
            _deliver(outcome.report, request, stream)
    return _exit_code(outcome, request.target)


def _load(request: Request) -> Workload | Script:
    from gradscope.workload import load_target

    return load_target(
        request.target,
        request.args,
        module=request.module,
        device=request.options.device,
        seed=request.options.seed,
    )


def _measure(loaded: Workload | Script, request: Request) -> Outcome:
    from gradscope import pipeline
    from gradscope.cli.progress import make_progress
    from gradscope.workload import Script

    # A script writes to the terminal as well: a line of ours that is drawn again and again would garble its own.
    progress = make_progress(quiet=request.quiet, live=not isinstance(loaded, Script))
    try:
        if isinstance(loaded, Script):
            return pipeline.profile_script(loaded, request.options, progress)
        return pipeline.profile_workload(loaded, request.options, progress)
    finally:
        progress.done()


def _deliver(report: Report, request: Request, stream: TextIO) -> None:
    if request.json_path is None:
        with reader_may_leave(stream):
            stream.write(report.to_json())
        _write_page(report, request)
        return
    from gradscope.report.terminal import make_console

    unwritten: OutputError | None = None
    try:
        report.save(request.json_path, force=request.force)  # first: the report names the file
    except OutputError as error:
        unwritten = error
    with reader_may_leave(stream):
        report.print(make_console(stream, request.color), **request.view)
    if unwritten is not None:
        raise unwritten
    if not request.quiet:
        say(f"wrote {request.json_path}")
    _write_page(report, request)


def _write_page(report: Report, request: Request) -> None:
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


def _exit_code(outcome: Outcome, target: str) -> int:
    error = outcome.error
    if isinstance(error, GradscopeError):
        raise error
    code = 0 if error is None else show_user_error(error)
    if outcome.report is not None:
        return code
    if code == 0:
        raise NothingMeasuredError(
            f"{target} left before one step was measured: there is nothing to report.\n"
            "Let it train for more steps, or measure less: --warmup 1 --steps 2."
        )
    say_error(f"nothing was measured: {target} ended before the measured steps.")
    return code


# --------------------------------------------------------------------------------------------------------------------
# Reading the command line
# --------------------------------------------------------------------------------------------------------------------


def _json_path(target: str, output: str | None, json_path: str | None, *, module: bool) -> Path | None:
    if json_path is not None:
        if output is not None:
            raise UsageError("-o and --json both say where RUN.json goes: give one of them.")
        return None if json_path == "-" else Path(json_path)
    prefix = output if output is not None else f"gradscope-{_stem(target, module=module)}"
    return Path(prefix if prefix.endswith(".json") else f"{prefix}.json")


def _html_path(json_path: Path | None, html_path: str | None, *, no_html: bool) -> Path | None:
    """Where the page goes: beside RUN.json, and nowhere if that goes to stdout."""
    if html_path is not None:
        if no_html:
            raise UsageError("--html and --no-html contradict each other: give one of them.")
        if html_path == "-":
            raise UsageError("--html writes a file: give its path, or write the page later with gradscope show.")
        return Path(html_path)
    if no_html or json_path is None:
        return None
    return beside(json_path)


def _stem(target: str, *, module: bool) -> str:
    """``gpt`` for ``examples/gpt.py``, ``gpt.py:small``, ``models.gpt:small`` and ``-m models.gpt``."""
    path = Path(target)
    if not path.exists():
        path = Path(target.rpartition(":")[0] or target)
    if path.suffix == ".py" or path.exists():
        return path.stem
    return path.name.rpartition(".")[2]


def _refuse_leftovers(context: typer.Context, target: str, module: bool) -> None:
    """What is left on the command line was meant for the script, or is misspelled: say how to write it."""
    leftovers: Sequence[str] = context.args
    if target.startswith("-"):  # unknown options come first where there is no target
        raise UsageError(f"gradscope profile has no option {target}{_guess(context, target)}\nTry: {_help(context)}")
    if not leftovers:
        return
    first = leftovers[0].partition("=")[0]
    after = shlex.join([*leftovers, *context.meta.get(SCRIPT_ARGS, ())])
    command = f"gradscope profile {'-m ' if module else ''}{shlex.quote(target)} -- {after}"
    if first.startswith("-"):
        raise UsageError(
            f"gradscope profile has no option {first}{_guess(context, first)}\n"
            f"Options of the script itself go after '--': {command}"
        )
    raise UsageError(f"unexpected argument {first}.\nArguments of the script itself go after '--': {command}")


def _guess(context: typer.Context, option: str) -> str:
    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    close = difflib.get_close_matches(option.partition("=")[0], known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else "."


def _help(context: typer.Context) -> str:
    return f"{context.command_path} --help"
