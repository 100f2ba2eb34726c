"""Budgets in a test: ``assert_within(report, baseline="main.json", max_regression=["5%", "h.*.attn=10%"])``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gradscope.compare.budgets import Budgets, check, percentage, regressions
from gradscope.compare.checkdocument import check_document, passes
from gradscope.document.terminal import to_text
from gradscope.report.report import Report
from gradscope.report.runfile import load_run
from gradscope.safe_text import shown_path
from gradscope.tables import RunData
from gradscope.units import bytes_of


def assert_within(
    run: Report | str | os.PathLike[str],
    baseline: Report | str | os.PathLike[str] | None = None,
    *,
    max_regression: Sequence[str] = (),
    max_memory_regression: str | None = None,
    max_peak: str | int | None = None,
    max_saved: str | int | None = None,
    strict: bool = False,
) -> None:
    """Hold a run against limits, as ``gradscope check`` does.

    Args:
        run, baseline: reports, or files that gradscope wrote.
        max_regression: of backward: ``"5%"`` for the step, ``"h.*.attn=10%"`` for layers; beyond noise.
        max_memory_regression: of peak memory and of saved tensors.
        max_peak, max_saved: bytes, or a text as ``"6GiB"``.
        strict: fail also where noise hides a limit.

    Raises:
        AssertionError: a limit is exceeded; the message is the table of all of them.
        GradscopeError: a limit has no meaning, or needs a baseline.
    """
    data, name = _loaded(run, "the run")
    reference, its_name = (None, None) if baseline is None else _loaded(baseline, "the baseline")
    step, layers = regressions(max_regression, "max_regression")
    growth = None if max_memory_regression is None else percentage(max_memory_regression, "max_memory_regression")
    budgets = Budgets(
        regression=step,
        layers=layers,
        memory_regression=growth,
        peak_bytes=None if max_peak is None else bytes_of(max_peak, "max_peak"),
        saved_bytes=None if max_saved is None else bytes_of(max_saved, "max_saved"),
    )
    checked = check(data, reference, budgets, (name, its_name))
    if not passes(checked, strict=strict):
        raise AssertionError("\n" + to_text(check_document(checked, strict=strict)))


def _loaded(run: Report | str | os.PathLike[str], name: str) -> tuple[RunData, str]:
    return (run.data, name) if isinstance(run, Report) else (load_run(run), shown_path(run))
