"""What is an estimate, in compiled code, is shown as one: a column, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gradscope.compare.build import compare
from gradscope.document.terminal import to_text
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


@pytest.mark.parametrize("show", [str, Report.to_markdown, Report._repr_html_])
def test_every_output_says_what_it_means(show: Callable[[Report], str]) -> None:
    assert "est.: split from kernels of several layers" in " ".join(show(Report(run(500_000))).split())
    assert "est.:" not in show(Report(run(0)))


def test_what_it_means_is_said_where_the_column_has_room() -> None:
    document = Report(run(500_000)).document()
    words = {width: to_text(document, width).split() for width in (24, 28, 32, 36, 40, 60, 80, 140)}
    shown = {width for width, found in words.items() if "est." in found}
    assert {80, 140} <= shown < set(words)
    assert {width for width, found in words.items() if "est.:" in found} == shown


def test_two_runs_of_which_one_is_estimated() -> None:
    notes = compare(run(None), run(500_000)).notes
    assert any("the run after was compiled" in note and "(est.)" in note for note in notes)
    assert not any("(est.)" in note for note in compare(run(None), run(0)).notes)
