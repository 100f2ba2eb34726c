"""Backward hooks are shown where they take time, in every form of a report, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradscope.report.report import Report
from gradscope.report.runfile import from_json, to_json
from gradscope.report.speedscope import to_speedscope
from gradscope.tables import ConservationError, RunData
from tests.report_fixtures import RunBuilder


def run(hook_ns: int) -> RunData:
    """A root of two layers, whose second has hooks."""
    builder = RunBuilder()
    builder.add("", "Net", 1_000_000, 1_000_000)
    builder.add("first", "Linear", 4_000_000, 2_000_000)
    builder.add("second", "Linear", 3_000_000, 2_000_000, hook_ns=hook_ns)
    return builder.build()


HOOKED, PLAIN = run(8_000_000), run(0)


@pytest.mark.parametrize("show", [str, Report.to_markdown])
def test_a_column_and_a_row_where_hooks_take_time(show: Callable[[Report], str]) -> None:
    shown, plain = show(Report(HOOKED)), show(Report(PLAIN))
    assert "hooks" in shown and "backward hooks" in shown
    assert "hooks" not in plain


def test_it_is_part_of_the_layers_backward() -> None:
    layers = {row.path: row for row in HOOKED.layers}
    assert layers["second"].backward_total_ns == 11_000_000 and layers[""].backward_total_ns == 16_000_000
    frame = Report(HOOKED).layers.set_index("path")
    assert frame.loc["second", "hook_ns"] == 8_000_000


def test_the_rest_of_the_forms_have_it(tmp_path: Path) -> None:
    assert from_json(to_json(HOOKED)) == HOOKED
    frames = [frame["name"] for frame in json.loads(to_speedscope(HOOKED))["shared"]["frames"]]
    assert "(backward hooks)" in frames
    page = Report(HOOKED).to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"hook_ns":[0,0,8000000]' in page.replace(" ", "")


def test_hooks_that_are_in_no_part_are_an_error_of_gradscopes() -> None:
    ledger = replace(HOOKED.ledger, hook_ns=7_999_999, engine_ns=HOOKED.ledger.engine_ns + 1)
    with pytest.raises(ConservationError, match="layers' hook_ns: 8000000 != 7999999 ns"):
        replace(HOOKED, ledger=ledger)
