"""``gradscope fit``: predict the peak memory of a training step at batch sizes that are not run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from gradscope.cli.failure import note_kept, say, say_loading, show_user_error
from gradscope.cli.options import (
    SCRIPT_ARGS,
    Color,
    ColorOption,
    ForceOption,
    MemoryBudgetOption,
    QuietOption,
    SeedOption,
    memory_budget,
    renamed,
    shown_target,
)
from gradscope.cli.streams import reader_may_leave, report_stream, write_json
from gradscope.errors import GradscopeError, OutputError, TargetError
from gradscope.safe_text import local_path, shown_path

if TYPE_CHECKING:
    from gradscope.fitting import FitReport
    from gradscope.fitting.options import FitOptions


@dataclass(frozen=True)
class FitRequest:
    """One ``gradscope fit``, as asked for."""

    target: str
    args: tuple[str, ...]
    settings: FitOptions
    to_stdout: bool  # the JSON goes to stdout, and nothing else does
    json_path: Path | None  # None: no file is written
    force: bool
    color: bool | None
    quiet: bool


def fit(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="model.py, model.py:name or package.module:name.")],
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", metavar="N,N,...", help="Batch sizes to predict, such as 8,16,32,64.")
    ],
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="SIZE",
            help="Memory of the device to fit: 6GiB, 24g or bytes; by default the CUDA device's.",
        ),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option("--reserve", metavar="SIZE", help="Device memory to keep free, such as 600MiB; 10% by default."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="NAME", help="Optimizer if the workload has none: adam, adamw or sgd."),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure", metavar="N,N,N,N", help="Batch sizes to run: three to fit, one to check; default 2,3,4,8."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Device to run them on: auto, cpu or cuda.")] = "auto",
    seed: SeedOption = None,
    budget: MemoryBudgetOption = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write FIT.json to PATH; - prints it instead of the report."),
    ] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    color: ColorOption = Color.auto,
) -> None:
    """Predict which batch sizes fit in a device's memory, without running them.

    A few small batches are measured. TARGET is a file that defines
    workload(), ideally with a batch_size parameter; arguments after -- are
    passed to it. Progress goes to stderr, the report to stdout.
    """
    say_loading(shown_target(target), quiet=quiet)
    from gradscope.fitting.options import settings_of

    settings = settings_of(
        batch_sizes,
        measure=measure,
        device_memory=device_memory,
        reserve=reserve,
        optimizer=optimizer,
        device=device,
        seed=seed,
        memory_budget=memory_budget(budget),
    )
    request = FitRequest(
        target=target,
        args=tuple(context.meta.get(SCRIPT_ARGS, ())),
        settings=settings,
        to_stdout=json_path == "-",
        json_path=None if json_path in (None, "-") else Path(local_path(str(json_path))),
        force=force,
        color=color.wanted,
        quiet=quiet,
    )
    raise typer.Exit(run(request, whole_process=bool(context.obj)))


def run(request: FitRequest, *, whole_process: bool) -> int:
    """Do what was asked for and return the exit code; a batch size that does not fit is no error.

    Raises:
        GradscopeError: the request cannot be met.
    """
    from gradscope.report.outfile import check_output

    if request.json_path is not None:
        check_output(request.json_path, force=request.force)
    with report_stream(exclusive=request.to_stdout, whole_process=whole_process) as stream:
        try:
            report = _fit(request)
        except GradscopeError:
            raise
        except BaseException as error:
            return show_user_error(error)
        _deliver(report, request, stream)
    return 0


def _fit(request: FitRequest) -> FitReport:
    from gradscope.cli.progress import make_progress
    from gradscope.fitting.run import fit_source, source_of
    from gradscope.workload import Script, load_factory

    settings = request.settings
    loaded = load_factory(request.target, request.args, device=settings.device, seed=settings.seed)
    if isinstance(loaded, Script):
        raise TargetError(_script_message(request.target))
    loaded = renamed(loaded, shown_target(loaded.target))
    progress = make_progress(quiet=request.quiet, live=True)
    try:
        return fit_source(source_of(loaded), settings, progress)
    finally:
        progress.done()


def _script_message(target: str) -> str:
    return (
        f"{target} is a training script, which makes its batches itself: gradscope cannot change their size.\n"
        "Write a model file beside it that imports its model, and fit that:\n"
        "    def workload(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)"
    )


def _deliver(report: FitReport, request: FitRequest, stream: TextIO) -> None:
    if request.to_stdout:
        with reader_may_leave(stream):
            write_json(stream, report.to_json())
        return
    from gradscope.document.terminal import make_console

    unwritten: OutputError | None = None
    if request.json_path is not None:
        try:
            report.save(request.json_path, force=request.force)
            note_kept(shown_path(request.json_path))
        except OutputError as error:
            unwritten = error
    with reader_may_leave(stream, beside_files=request.json_path is not None and unwritten is None):
        report.print(make_console(stream, request.color))
    if unwritten is not None:
        raise unwritten
    if request.json_path is not None and not request.quiet:
        say(f"wrote {shown_path(request.json_path)}")
