"""What is an estimate, in compiled code, is shown as one: a column, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gradscope.compare.build import compare
from gradscope.report.report import Report
from gradscope.tables import RunData
from tests.report_fixtures import RunBuilder


def run(estimated_ns: int | None) -> RunData:
    builder = RunBuilder()
    builder.add("", "Net", 1_000_000, 1_000_000)
    builder.add("first", "Linear", 4_000_000, 2_000_000)
    made = builder.build()
    return replace(made, layers=tuple(replace(row, estimated_ns=estimated_ns) for row in made.layers))


@pytest.mark.parametrize("show", [str, Report.to_markdown])
def test_the_column_is_there_where_there_is_something_in_it(show: Callable[[Report], str]) -> None:
    assert " est. " in show(Report(run(500_000)))
    assert not any(" est. " in show(Report(without)) for without in (run(None), run(0)))


def test_the_terminal_says_what_it_means() -> None:
    assert "est.: split from kernels of several layers" in " ".join(str(Report(run(500_000))).split())
    assert "est.:" not in str(Report(run(0)))


def test_two_runs_of_which_one_is_estimated() -> None:
    notes = compare(run(None), run(500_000)).notes
    assert any("the run after was compiled" in note and "(est.)" in note for note in notes)
    assert not any("(est.)" in note for note in compare(run(None), run(0)).notes)
