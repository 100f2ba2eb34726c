"""``_repr_html_``: what a notebook shows of a report and of a comparison."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest

from gradscope.compare import diff
from gradscope.document.html import bar, text
from gradscope.report import Report
from gradscope.report.view import build_view
from gradscope.tables import RunData
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures
from tests.page import runs


def _words(fragment: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", fragment))


def test_it_holds_what_the_terminal_shows() -> None:
    report = Report(memory_fixtures.gpt(12))
    words = _words(report._repr_html_())
    view = build_view(report.data)
    for row in view.tree.rows:
        assert row.node.name in words
    for hidden in view.tree.hidden:
        assert hidden.text in words
    assert "12.6 s = layers 12.6 s (99.8 %) + autograd overhead 31.0 ms (0.2 %)" in words
    assert "5 steps ±1.4 % · overhead ×1.03" in words


@pytest.mark.parametrize(
    "run",
    [
        fixtures.gpt(200),
        fixtures.many_modules(200),
        fixtures.many_modules(5_000),
        memory_fixtures.gpt(200),
        runs.hostile(),
    ],
    ids=["gpt", "wide", "very wide", "memory", "hostile"],
)
def test_it_is_small_and_has_nothing_but_text_and_tables(run: RunData) -> None:
    fragment = Report(run)._repr_html_()
    assert len(fragment.encode()) < 100_000
    assert set(re.findall(r"<(\w+)", fragment)) <= {
        "div",
        "span",
        "b",
        "table",
        "thead",
        "tbody",
        "tr",
        "td",
        "th",
        "code",
    }


def test_a_run_without_layers_memory_or_time_is_shown() -> None:
    empty = fixtures.RunBuilder().build(overhead=None, partial=True)
    empty = dataclasses.replace(empty, step=dataclasses.replace(empty.step, spread={}))
    words = _words(Report(empty)._repr_html_())
    assert "PARTIAL" in words and "no layers were seen" in words
    assert "memory" not in words
    assert "0 ns" in _words(diff(empty, empty)._repr_html_())


def test_an_odd_repeat_and_findings_are_said() -> None:
    words = _words(Report(fixtures.gpt(12, slow_block=4, findings=fixtures.findings()))._repr_html_())
    assert "transformer.h.4.attn takes ×" in words
    assert "critical: attention is computed by hand" in words


def test_text_is_no_markup_and_no_mathematics() -> None:
    assert text("<b>$x$\0") == "&lt;b&gt;<span>$</span>x<span>$</span><span>\\</span>x00"
    assert len(text("y" * 4_000)) == 80


def test_bars_never_leave_their_box() -> None:
    for own, total in ((0.3, 0.9), (1.5, 2.0), (-1.0, 0.5), (0.0, 0.0)):
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar(own, total))]
        assert sum(widths) <= 100


def test_a_comparison_shows_its_tables_and_warnings() -> None:
    before = fixtures.gpt(12)
    after = fixtures.gpt(12, slow_block=4, environment={**fixtures.CPU, "torch": "2.12.0"})
    words = _words(diff(before, after)._repr_html_())
    for expected in ("WARNING", "torch", "Totals", "transformer.h.4.attn", "+90.0 %"):
        assert expected in words


def test_notebooks_find_it() -> None:
    from IPython.core import formatters

    report = Report(fixtures.mlp())
    data, _ = formatters.DisplayFormatter().format(report)
    assert data["text/html"] == report._repr_html_()
