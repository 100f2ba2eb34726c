"""Budgets in a test: ``assert_within(report, baseline="main.json", max_regression=["5%", "h.*.attn=10%"])``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from gradscope.compare.budgets import Budgets, check, percentage, regressions
from gradscope.compare.checkdocument import check_document, hidden, offenders, passes
from gradscope.document.terminal import to_text
from gradscope.errors import GradscopeError, UsageError
from gradscope.report.report import Report
from gradscope.report.runfile import load_run
from gradscope.safe_text import shown_path, shown_repr
from gradscope.tables import RunData
from gradscope.units import bytes_of

_Run = Report | str | os.PathLike[str]

# As the messages of gradscope check have them.
_SPELLED = {
    "--max-regression: ": "max_regression: ",
    "--max-regression 5%": "max_regression='5%'",
    "--max-memory-regression 2%": "max_memory_regression='2%'",
    "--max-peak 6GiB": "max_peak='6GiB'",
    "--max-saved 2GiB": "max_saved='2GiB'",
    "--baseline BASELINE.json": "baseline='BASELINE.json'",
    "with --steps 5": "with steps=5",
    "without --no-memory": "with memory=True",
}


def assert_within(
    run: _Run,
    baseline: _Run | None = None,
    *,
    max_regression: str | Sequence[str] = (),
    max_memory_regression: str | None = None,
    max_peak: str | int | None = None,
    max_saved: str | int | None = None,
    strict: bool = False,
) -> None:
    """Hold a run against limits, as ``gradscope check`` does.

    Args:
        run, baseline: reports, or files that gradscope wrote.
        max_regression: of backward: ``"5%"`` for the step, ``"h.*.attn=10%"`` for layers; beyond noise. One or several.
        max_memory_regression: of peak memory and of saved tensors.
        max_peak, max_saved: bytes, or a text as ``"6GiB"``.
        strict: fail also where noise hides a limit.

    Warns of layers that a glob matches in one run only: they are not checked.

    Raises:
        AssertionError: a limit is exceeded; the message names it, and is the table of all of them.
        GradscopeError: a limit has no meaning, or needs a baseline.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    try:
        budgets = _budgets(max_regression, max_memory_regression, max_peak, max_saved)
        failed = _failed(run, baseline, budgets, strict=strict)
    except GradscopeError as error:
        raise type(error)(_in_python(str(error))) from None
    if failed is not None:
        raise AssertionError(failed)


def _budgets(
    max_regression: str | Sequence[str], growth: str | None, peak: str | int | None, saved: str | int | None
) -> Budgets:
    step, layers = regressions(_texts(max_regression), "max_regression")
    return Budgets(
        regression=step,
        layers=layers,
        memory_regression=None if growth is None else percentage(growth, "max_memory_regression"),
        peak_bytes=None if peak is None else bytes_of(peak, "max_peak"),
        saved_bytes=None if saved is None else bytes_of(saved, "max_saved"),
    )


def _texts(values: object) -> list[str]:
    listed: list[Any] = list(values) if isinstance(values, list | tuple) else [values]
    for value in listed:
        if not isinstance(value, str):
            raise UsageError(
                f"max_regression: {shown_repr(value)} is not a percentage.\nGive a text with its sign: '5%'"
            )
    return listed


def _failed(run: _Run, baseline: _Run | None, budgets: Budgets, *, strict: bool) -> str | None:
    """What fails, in a line, and the table of all limits; None where nothing does."""
    data, name = _loaded(run, "run")
    reference, its_name = (None, None) if baseline is None else _loaded(baseline, "baseline")
    checked = check(data, reference, budgets, (name, its_name))
    if passes(checked, strict=strict):
        for note in checked.notes:
            warnings.warn(f"gradscope: {note}", stacklevel=3)  # the test's own line
        return None
    hides = f"noise hides the limit: {hidden(checked.inconclusive)}"
    first = f"over the limit: {offenders(checked.over)}" if checked.over else hides
    return f"{first}\n{to_text(check_document(checked, strict=strict))}"


def _loaded(run: object, name: str) -> tuple[RunData, str]:
    if isinstance(run, Report):
        return run.data, f"the {name}"
    if isinstance(run, str | os.PathLike):
        return load_run(run), shown_path(run)
    raise UsageError(f"{name} is {shown_repr(run)}; it must be a Report or the path of a RUN.json.")


def _in_python(text: str) -> str:
    """The same with options as Python spells them; words of the user's, which may hold dashes too, stay."""
    for option, spelled in _SPELLED.items():
        text = text.replace(option, spelled)
    return text
