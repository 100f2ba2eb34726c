"""``gradscope fix``: put recipes into a model, prove them, measure the gain, and show or make the change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from gradscope.cli.failure import note_kept, say, say_loading, show_user_error
from gradscope.cli.options import (
    SCRIPT_ARGS,
    Color,
    ColorOption,
    DeviceOption,
    MemoryBudgetOption,
    ModuleOption,
    NoHtmlOption,
    NoLinesOption,
    NoMemoryOption,
    NoSourceOption,
    QuietOption,
    SeedOption,
    StepsOption,
    TargetArgument,
    WarmupOption,
    html_path_of,
    json_path_of,
    memory_budget,
    refuse_leftovers,
    renamed,
    shown_target,
)
from gradscope.cli.streams import link, reader_may_leave, report_stream, write_json
from gradscope.errors import GradscopeError, OutputError, UsageError, VerificationError
from gradscope.safe_text import shown_path, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradscope.fixing import FixReport
    from gradscope.fixing.options import FixOptions
    from gradscope.fixing.report import Edited


@dataclass(frozen=True)
class FixRequest:
    """One ``gradscope fix``, as asked for."""

    target: str
    args: tuple[str, ...]
    module: bool
    settings: FixOptions
    json_path: Path | None  # None: the JSON goes to stdout, and nothing else does
    diff_path: Path | None
    html_path: Path | None  # None: no page
    source: bool  # the page holds the text of source lines
    write: bool
    force: bool
    color: bool | None
    quiet: bool


def fix(
    context: typer.Context,
    target: TargetArgument,
    module: ModuleOption = False,
    only: Annotated[str | None, typer.Option("--only", metavar="RECIPE,...", help="Try only these recipes.")] = None,
    skip: Annotated[
        str | None, typer.Option("--skip", metavar="RECIPE,...", help="Try all recipes except these.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what could be replaced; verify, measure and write nothing.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Apply the diff to your source files; a backup of each is kept.")
    ] = False,
    steps: StepsOption = 5,
    warmup: WarmupOption = 3,
    curve_steps: Annotated[
        int, typer.Option("--curve-steps", min=1, help="Training steps of a script whose losses are compared.")
    ] = 20,
    device: DeviceOption = "auto",
    seed: SeedOption = None,
    no_lines: NoLinesOption = False,
    no_memory: NoMemoryOption = False,
    budget: MemoryBudgetOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PREFIX",
            help="Write PREFIX.json, PREFIX.diff and PREFIX.html; gradscope-<target>-fix by default.",
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write FIX.json to PATH; - prints it instead of the report."),
    ] = None,
    html_path: Annotated[
        str | None,
        typer.Option("--html", metavar="PATH", help="Write the before/after HTML page to PATH."),
    ] = None,
    no_html: NoHtmlOption = False,
    no_source: NoSourceOption = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Overwrite files that gradscope did not write; with --write, also uncommitted source.",
        ),
    ] = False,
    quiet: QuietOption = False,
    color: ColorOption = Color.auto,
) -> None:
    """Swap faster recipes into the model of TARGET, verify them, and measure the gain.

    Each replacement is checked on your own batch against float64, outputs and
    gradients, and the whole step is timed with and without it; anything
    incorrect, slower or larger is reverted. Your files change only with
    --write. Arguments after -- are passed to TARGET. Progress goes to stderr,
    the report to stdout.
    """
    refuse_leftovers(context, target, module)
    _refuse_contradictions(dry_run=dry_run, write=write, output=output, json_path=json_path)
    say_loading(shown_target(target, module=module), quiet=quiet)
    from gradscope.fixing.options import FixOptions, chosen_recipes
    from gradscope.patching.match.matchers import MATCHERS
    from gradscope.tables import Options

    run_path = _fix_path_of(target, output, json_path, module=module)
    page_path = html_path_of(run_path, html_path, no_html=no_html)
    request = FixRequest(
        target=target,
        args=tuple(context.meta.get(SCRIPT_ARGS, ())),
        module=module,
        settings=FixOptions(
            Options(
                steps=steps,
                warmup=warmup,
                device=device,
                seed=seed,
                lines=not no_lines,
                memory=not no_memory,
                memory_budget=memory_budget(budget),
            ),
            chosen_recipes(only, skip, list(MATCHERS)),
            dry_run,
            curve_steps,
        ),
        json_path=None if dry_run else run_path,
        diff_path=None if dry_run or run_path is None else run_path.with_suffix(".diff"),
        html_path=None if dry_run else page_path,
        source=not no_source,
        write=write,
        force=force,
        color=color.wanted,
        quiet=quiet,
    )
    to_stdout = run_path is None
    raise typer.Exit(run(request, to_stdout=to_stdout, whole_process=bool(context.obj)))


def _refuse_contradictions(*, dry_run: bool, write: bool, output: str | None, json_path: str | None) -> None:
    if dry_run and write:
        raise UsageError("--dry-run writes nothing, and --write does: give one of them.")
    if dry_run and json_path is not None:
        raise UsageError("--dry-run writes no FIX.json: leave out --json.")
    if output is not None and json_path is not None:
        raise UsageError("-o and --json both say where FIX.json goes: give one of them.")


def _fix_path_of(target: str, output: str | None, json_path: str | None, *, module: bool) -> Path | None:
    """Return where FIX.json goes; None where it goes to stdout. The name is told from the one of ``profile``."""
    run_path = json_path_of(target, output, json_path, module=module)
    if run_path is not None and output is None and json_path is None:
        run_path = run_path.with_name(f"{run_path.stem}-fix.json")
    return run_path


def run(request: FixRequest, *, to_stdout: bool, whole_process: bool) -> int:
    """Do what was asked for and return the exit code.

    Raises:
        GradscopeError: the request cannot be met; before anything of the user's has run if that can be known.
    """
    _check_outputs(request)
    with report_stream(exclusive=to_stdout, whole_process=whole_process) as stream:
        try:
            report = _fix(request)
        except GradscopeError:
            raise
        except BaseException as error:
            return show_user_error(error)
        _deliver(report, request, stream, to_stdout=to_stdout)
    return VerificationError.exit_code if report.data.failed else 0


def _check_outputs(request: FixRequest) -> None:
    from gradscope.fixing.report import DIFF_HEAD
    from gradscope.fixing.result import FIX_HEAD
    from gradscope.report.outfile import check_output
    from gradscope.report.page import HTML_HEAD

    for path, head in (
        (request.json_path, FIX_HEAD),
        (request.diff_path, DIFF_HEAD),
        (request.html_path, HTML_HEAD),
    ):
        if path is not None:
            check_output(path, head, force=request.force)


def _fix(request: FixRequest) -> FixReport:
    from gradscope.cli.progress import make_progress
    from gradscope.fixing.report import check_writable
    from gradscope.fixing.run import fix_workload
    from gradscope.fixing.script import fix_script
    from gradscope.report.outfile import check_output
    from gradscope.workload import Script, load_target

    options = request.settings.options
    args = request.args
    loaded = load_target(request.target, args, module=request.module, device=options.device, seed=options.seed)
    loaded = renamed(loaded, shown_target(loaded.target or request.target, module=request.module))
    progress = make_progress(quiet=request.quiet, live=not isinstance(loaded, Script))

    def check(files: Sequence[Edited]) -> None:
        check_writable(files, force=request.force)
        for file in files:
            check_output(file.shown, force=True)  # the backup is made in its folder

    asked = check if request.write else None
    try:
        if isinstance(loaded, Script):
            report = fix_script(loaded, request.settings, progress, asked, quiet=request.quiet)
        else:
            report = fix_workload(loaded, request.settings, progress, asked)
    finally:
        progress.done()
    report.data = replace(report.data, args=args)
    return report


def _deliver(report: FixReport, request: FixRequest, stream: TextIO, *, to_stdout: bool) -> None:
    backups, unwritten = _write(report, request) if request.write else ([], None)
    made: list[Path] = []
    try:
        if request.json_path is not None:
            made.append(report.save(request.json_path, force=request.force))
            note_kept(shown_path(made[-1]))
        if request.diff_path is not None and report.data.diff:
            made.append(report.save_diff(request.diff_path, force=request.force))
            note_kept(shown_path(made[-1]))
    except OutputError as error:
        unwritten = unwritten or error
    _drop_old(report, request)
    unprinted: OutputError | None = None
    try:
        _print(report, request, stream, to_stdout=to_stdout, beside_files=bool(made))
    except OutputError as error:  # the files are worth all the more
        unprinted = error
    if request.html_path is not None and unwritten is None:
        try:
            page = report.to_html(request.html_path, source=request.source, force=request.force)
            made += [page] if page is not None else []
            if page is None and not request.quiet:
                say("no page: it compares two profiles, and no replacement was kept")
        except OutputError as error:
            unwritten = error
    if not request.quiet:
        _say_made(backups, made)
    if failed := unwritten or unprinted:
        raise failed


def _say_made(backups: Sequence[tuple[str, str]], made: Sequence[Path]) -> None:
    """Also where more was to be made: who has no room for all of it must know what became of the source."""
    import sys

    for name, backup in backups:
        say(f"changed {visible(name)}; as it was: {visible(backup)}")
    for path in made:
        say(f"wrote {link(path, sys.stderr)}")


def _print(report: FixReport, request: FixRequest, stream: TextIO, *, to_stdout: bool, beside_files: bool) -> None:
    with reader_may_leave(stream, beside_files=beside_files and not to_stdout):
        if to_stdout:
            write_json(stream, report.to_json())
            return
        from gradscope.document.terminal import make_console

        report.print(make_console(stream, request.color), request.diff_path if report.data.diff else None)


def _drop_old(report: FixReport, request: FixRequest) -> None:
    """A diff or page of an earlier fix says what does not hold any more."""
    from gradscope.fixing.report import DIFF_HEAD
    from gradscope.report.page import HTML_HEAD

    for path, head, made in (
        (request.diff_path, DIFF_HEAD, bool(report.data.diff)),
        (request.html_path, HTML_HEAD, report.after is not None),
    ):
        if path is not None and not made and path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                ours = head.match(file.read(4096))
            if ours:
                path.unlink()


def _write(report: FixReport, request: FixRequest) -> tuple[list[tuple[str, str]], OutputError | None]:
    """Change the user's files; nothing where a proof failed. What was measured is shown all the same."""
    if report.data.failed:
        say("your source was not changed: a recipe failed verification")
        return [], None
    if not report.files:
        say("your source was not changed: no replacement was kept")
        return [], None
    try:
        backups = report.write()
        for name, backup in backups:
            note_kept(f"{visible(name)}, changed (as it was: {visible(backup)})")
        return backups, None
    except OutputError as error:
        return [], error
