"""``gradscope check``: hold a run against limits, for continuous integration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli.options import Color, ColorOption
from gradscope.cli.streams import reader_may_leave, write_json
from gradscope.errors import BudgetExceededError
from gradscope.safe_text import local_path
from gradscope.units import bytes_of

if TYPE_CHECKING:
    from gradscope.compare.budgets import Budgets
    from gradscope.compare.check_config import CheckSettings


def check(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="A file written by gradscope profile.")],
    baseline: Annotated[Path | None, typer.Option("--baseline", metavar="B.json", help="Run to compare with.")] = None,
    max_regression: Annotated[
        list[str] | None,
        typer.Option(
            "--max-regression",
            metavar="[GLOB=]P%",
            help="Allowed slowdown of backward: 5% for the step, 'h.*.attn=10%' for layers. May be repeated.",
        ),
    ] = None,
    max_memory_regression: Annotated[
        str | None,
        typer.Option(
            "--max-memory-regression", metavar="P%", help="Allowed growth of peak memory and of saved tensors: 2%."
        ),
    ] = None,
    max_peak: Annotated[
        str | None, typer.Option("--max-peak", metavar="SIZE", help="Limit on peak memory: 6GiB, 6GB or bytes.")
    ] = None,
    max_saved: Annotated[
        str | None, typer.Option("--max-saved", metavar="SIZE", help="Limit on tensors saved for backward: 2GiB.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail also where the result is inconclusive: noise hides the limit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    color: ColorOption = Color.auto,
) -> None:
    """Hold a run against limits, for CI: exit code 4 where it is over one of them beyond noise.

    Where the two runs vary too much to see a regression of the size that the
    limit allows, the result is inconclusive: exit code 0, or 4 with --strict.
    Limits not given here are read from [tool.gradscope.check] in the nearest
    pyproject.toml.
    """
    from gradscope.compare.budgets import check as judge
    from gradscope.compare.check_config import find_settings
    from gradscope.compare.checkdocument import check_document, hidden, offenders, to_json
    from gradscope.config import working_folder
    from gradscope.report.runfile import load_run

    settings = find_settings(working_folder())
    budgets = _budgets(settings, max_regression, max_memory_regression, max_peak, max_saved)
    run = Path(local_path(run))
    strict = strict or settings.strict
    reference = settings.baseline if baseline is None else baseline
    reference = None if reference is None else Path(local_path(reference))
    names = (str(run), None if reference is None else str(reference))
    checked = judge(load_run(run), None if reference is None else load_run(reference), budgets, names)
    with reader_may_leave(sys.stdout):
        if as_json:
            write_json(sys.stdout, to_json(checked, strict=strict))
        else:
            from gradscope.document.terminal import make_console, print_document

            print_document(check_document(checked, strict=strict), make_console(sys.stdout, color.wanted))
    if checked.over:
        raise BudgetExceededError(f"over the limit: {offenders(checked.over)}.")
    if strict and checked.inconclusive:
        raise BudgetExceededError(f"inconclusive, which --strict makes fail: {hidden(checked.inconclusive)}.")


def _budgets(
    settings: CheckSettings,
    max_regression: list[str] | None,
    max_memory_regression: str | None,
    max_peak: str | None,
    max_saved: str | None,
) -> Budgets:
    """Each limit from the command line, or else from the settings."""
    from gradscope.compare.budgets import Budgets, percentage, regressions

    step, layers = regressions(
        max_regression or settings.max_regression or (),
        "--max-regression" if max_regression else settings.name("max-regression"),
    )
    growth, name = _chosen(max_memory_regression, settings.max_memory_regression, "max-memory-regression", settings)
    return Budgets(
        regression=step,
        layers=layers,
        memory_regression=None if growth is None else percentage(growth, name),
        peak_bytes=_amount(*_chosen(max_peak, settings.max_peak, "max-peak", settings)),
        saved_bytes=_amount(*_chosen(max_saved, settings.max_saved, "max-saved", settings)),
    )


def _chosen(given: str | None, setting: str | None, key: str, settings: CheckSettings) -> tuple[str | None, str]:
    """The value, and what messages call it."""
    return (setting, settings.name(key)) if given is None else (given, f"--{key}")


def _amount(text: str | None, name: str) -> int | None:
    return None if text is None else bytes_of(text, name)
