"""The page of two runs in a real browser, by clicks and keys, and numbers read back from its DOM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradscope.compare import diff
from gradscope.tables import RunData
from tests import diff_fixtures
from tests.page import runs
from tests.page.conftest import Opened
from tests.page.test_accessible import _violations, axe  # noqa: F401 (a fixture is used by its name)

pytestmark = pytest.mark.browser

MS = diff_fixtures.MS
OpenDiff = Callable[..., Opened]


@pytest.fixture
def open_diff(chromium: Any, tmp_path: Path) -> Iterator[OpenDiff]:
    """Write the page of two runs and open it; the test fails if it complained, or asked for anything."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_it(
        before: RunData, after: RunData, anchor: str = "", size: tuple[int, int] = (1400, 900), scheme: str = "light"
    ) -> Opened:
        path = diff(before, after).to_html(tmp_path / "diff.html")
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: None if request.url.startswith(path.as_uri()) else complaints.append(request.url[:200]),
        )
        page.goto(path.as_uri() + anchor)
        return Opened(page, complaints)

    yield open_it
    for context in contexts:
        context.close()
    assert [one for one in complaints if not one.startswith(("blob:", "data:"))] == []


def changes(opened: Opened) -> dict[str, float]:
    """The Change column by the name of its row."""
    return {
        str(row.query_selector("th").get_attribute("data-value")): float(
            row.query_selector("td.change").get_attribute("data-value") or 0
        )
        for row in opened.page.query_selector_all("#rows tbody tr")
    }


@pytest.mark.parametrize("merged", ["true", "false"])
@pytest.mark.parametrize("metric", ["backward", "forward", "both", "saved"])
def test_own_changes_are_after_minus_before(open_diff: OpenDiff, merged: str, metric: str) -> None:
    before, after = runs.pair()
    opened = open_diff(before, after, f"#merged={merged}&metric={metric}")
    assert before.memory is not None and after.memory is not None
    whole = {
        "backward": after.ledger.backward_ns - before.ledger.backward_ns,
        "forward": after.step.forward_ns - before.step.forward_ns,
        "saved": after.memory.saved_bytes - before.memory.saved_bytes,
    }
    whole["both"] = whole["backward"] + whole["forward"]
    assert sum(changes(opened).values()) == whole[metric]


@pytest.mark.parametrize("tab", ["ledger", "peak"])
def test_other_tables_add_up(open_diff: OpenDiff, tab: str) -> None:
    before, after = runs.pair()
    assert before.memory is not None and after.memory is not None
    opened = open_diff(before, after, f"#tab={tab}")
    cells = opened.page.query_selector_all("#rows td.change")
    whole = {
        "ledger": after.ledger.backward_ns - before.ledger.backward_ns,
        "peak": after.memory.peak_bytes - before.memory.peak_bytes,
    }
    assert sum(float(cell.get_attribute("data-value")) for cell in cells) == whole[tab]


def test_each_layer_agrees_with_the_terminal(open_diff: OpenDiff) -> None:
    before, after = runs.pair()
    opened = open_diff(before, after, "#merged=false")
    shown = {
        row.query_selector("th").get_attribute("data-value"): "change-none"
        not in row.query_selector("td.change").get_attribute("class")
        for row in opened.page.query_selector_all("#rows tbody tr:not(.new):not(.removed)")
    }
    real = {
        layer.path: bool(layer.changes["backward_own_ns"].real)
        for layer in diff(before, after).data.layers
        if layer.status == "matched" and layer.path.startswith("h.")
    }
    assert sum(real.values()) == 1 and real["h.1.fc"]
    assert {path: shown[path] for path in real} == real


def test_new_and_removed_layers_are_tagged_rows(open_diff: OpenDiff) -> None:
    page = open_diff(*runs.pair()).page
    assert page.locator("tr.removed").count() == 1
    assert page.locator("tr.removed").inner_text().startswith("removed")
    name = page.locator("tr.removed bdi").first
    assert name.inner_text() == "old"
    assert "line-through" in name.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert page.locator("tr.new").inner_text().startswith("new")
    page.click("tr.removed button.name")
    assert page.locator(".selection").inner_text().startswith("old")
    assert page.locator('[data-compared="backward"]').inner_text().split("\t") == [
        "Backward",
        "4.00 ms",
        "0 ns",
        "−4.00 ms",
        "removed",
    ]


def test_another_class_is_not_folded_away(open_diff: OpenDiff) -> None:
    names = list(changes(open_diff(*runs.pair())))
    assert "h.0.fc" in names
    assert not any(name.startswith("h.*") for name in names)


def test_the_difference_between_the_runs_is_at_the_top(open_diff: OpenDiff) -> None:
    opened = open_diff(*runs.pair())
    assert "torch: 2.13.0+cpu before, 9.9.9 after" in opened.page.locator(".warnings").inner_text()
    assert opened.page.title().startswith("comparison · Net")
    delta = opened.page.locator('[data-metric="backward"] .delta')
    assert delta.inner_text().startswith("+22.0 ms")
    assert "change-more" in str(delta.get_attribute("class"))
    assert "less" in opened.page.locator(".legend-bar").inner_text()


def test_comparing_can_be_turned_off_and_on(open_diff: OpenDiff) -> None:
    opened = open_diff(*runs.pair(), "#select=layer/h.1.fc")
    page = opened.page
    assert page.input_value("#colour") == "change"
    page.click("#compare")
    assert "compare=false" in opened.state()
    assert page.locator("td.change").count() == 0
    assert page.locator(".compared").count() == 0
    assert page.input_value("#colour") == "type"
    page.locator("canvas").focus()
    page.keyboard.press("c")
    assert "compare" not in opened.state()
    assert page.locator("td.change").count() > 0
    page.reload()
    page.select_option("#colour", "type")
    assert "colour=type" in opened.state()
    assert page.locator(".legend-bar .key").count() > 0


def test_the_column_sorts_by_size(open_diff: OpenDiff) -> None:
    opened = open_diff(*runs.pair(), "#merged=false")
    sizes = [abs(value) for value in changes(opened).values()]
    assert sizes == sorted(sizes, reverse=True)
    opened.page.click('[data-sort="change"]')
    sizes = [abs(value) for value in changes(opened).values()]
    assert sizes == sorted(sizes)


def test_details_say_what_is_noise(open_diff: OpenDiff) -> None:
    opened = open_diff(*runs.pair(), "#merged=false&select=layer/h.1.fc")
    row = opened.page.locator('[data-compared="backward"]').inner_text()
    assert row.startswith("Backward\t10.0 ms\t30.0 ms\t+20.0 ms\tbeyond ±")
    opened.page.goto(opened.page.url.split("#")[0] + "#merged=false&select=layer/h.0.fc")
    assert opened.page.locator('[data-compared="saved"]').inner_text() == "Saved memory\t1.00 kB\t400 B\t−600 B\texact"
    assert "the same" in opened.page.locator('[data-compared="backward"]').inner_text()


def test_each_repeat_shows_before_and_after(open_diff: OpenDiff) -> None:
    before, after = runs.pair()
    opened = open_diff(before, after, "#merged=false&select=layer/h.1")
    same = open_diff(before, before, "#select=layer/h.1")
    bars = same.page.query_selector_all(".bars button .past")
    assert [float(bar.get_attribute("data-value")) for bar in bars] == [20 * MS] * 3
    assert "before" in same.page.locator(".bars button").first.get_attribute("aria-label")
    assert opened.page.locator(".compared").count() == 1


def test_memory_of_one_run_only(open_diff: OpenDiff) -> None:
    before, after = runs.pair()
    row = {"saved_bytes": None, "saved_total_bytes": None, "allocated_bytes": None, "allocations": None}
    layers = [dataclasses.replace(layer, **row, copied_bytes=None, peak_bytes=None) for layer in before.layers]
    bare = dataclasses.replace(before, memory=None, layers=layers)
    opened = open_diff(bare, after, "#metric=saved")
    assert "memory was not measured in the run before" in opened.page.locator(".warnings").inner_text()
    assert opened.page.locator("td.change").count() == 0
    assert opened.page.input_value("#colour") == "type"
    assert open_diff(after, bare).page.locator("td.change").count() > 0


def test_nothing_in_common(open_diff: OpenDiff) -> None:
    one = diff_fixtures.run({"": diff_fixtures.around(MS, 0)})
    other = diff_fixtures.run({"": diff_fixtures.around(2 * MS, 0)})
    other = dataclasses.replace(
        other,
        layers=[dataclasses.replace(row, path="other") for row in other.layers],
        ops=[dataclasses.replace(op, layer="other" if op.layer == "" else op.layer) for op in other.ops],
    )
    opened = open_diff(one, other)
    assert sum(changes(opened).values()) == other.ledger.backward_ns - one.ledger.backward_ns
    assert (opened.page.locator("tr.removed").count(), opened.page.locator("tr.new").count()) == (1, 1)


def test_an_empty_run(open_diff: OpenDiff) -> None:
    _, after = runs.pair()
    empty = diff_fixtures.run({"": (0,) * 5})
    assert open_diff(empty, after).page.locator("tr.new").count() > 3
    assert open_diff(after, empty).page.locator("tr.removed").count() > 3


def test_hostile_names_in_both_runs(open_diff: OpenDiff) -> None:
    page = open_diff(runs.hostile(), runs.gpt()).page
    for tab in ("layers", "ops", "lines", "peak"):
        page.click(f"#tab-{tab}")
    assert page.evaluate("window.hacked") is None
    page = open_diff(runs.gpt(), runs.hostile()).page
    assert page.evaluate("window.hacked") is None


def test_findings_of_the_run_after_are_behind_the_table(open_diff: OpenDiff) -> None:
    run = runs.device()
    page = open_diff(run, run).page
    assert page.get_attribute("#tab-layers", "aria-selected") == "true"
    page.click("#headline")
    assert page.locator("#findings .findings > li").count() == len(run.findings)
    page.keyboard.press("c")
    page.click("#finding-0 .link")
    assert page.locator(".selection").inner_text().startswith("attn")


def test_nothing_empty_where_no_rule_looked(open_diff: OpenDiff) -> None:
    page = open_diff(*runs.pair(), "#tab=findings").page
    assert page.locator("#tab-findings, #headline").count() == 0
    assert page.locator("#findings").is_hidden() and page.locator("#rows tbody tr").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1400, 900), (900, 700)])
def test_axe_finds_nothing(open_diff: OpenDiff, axe: str, scheme: str, size: tuple[int, int]) -> None:  # noqa: F811
    page = open_diff(*runs.pair(), "#merged=false&select=layer/h.1.fc", size, scheme).page
    page.evaluate(axe)
    found = []
    for tab in ("layers", "ops", "lines", "ledger", "peak"):
        page.click(f"#tab-{tab}")
        found += [f"{tab}: {one}" for one in _violations(page)]
    assert found == []
