"""Tables of the page at the widths of phones, paper and screens: what is cut, what goes, what stays whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradscope.tables import RunData
from tests.page import runs
from tests.page.conftest import Open
from tests.page.test_compare import open_diff  # noqa: F401 (a fixture is used by its name)

pytestmark = pytest.mark.browser

WIDTHS = (390, 794, 1024, 1280, 1366, 1440, 1920)

# Names of which the end is cut, and lines of which anything is.
CUT = """(() => {
  const cut = [];
  for (const name of document.querySelectorAll("#rows .front:is(.name, td)")) {
    const [text, room] = [name.querySelector("bdi") ?? name, name].map((one) => one.getBoundingClientRect());
    if (room.width === 0) continue;
    if (text.right > room.right + 1) cut.push(`end: ${name.textContent}`);
    if (name.matches(".whole") && text.left < room.left - 1) cut.push(`line: ${name.textContent}`);
  }
  return cut;
})()"""
NARROWEST = """Math.min(...[...document.querySelectorAll("#rows tbody th")].map((cell) => cell.clientWidth))"""


def deep() -> RunData:
    """A run with findings whose layers have long paths."""
    run = runs.limited()
    return dataclasses.replace(run, notes=("a note " * 40,))


def wider(page: Any) -> list[str]:
    """What sticks out of the window, or of the table's pane."""
    return [
        what
        for what, test in (
            ("page", "document.documentElement.scrollWidth > innerWidth"),
            ("rows", "document.querySelector('#rows').scrollWidth > document.querySelector('#rows').clientWidth"),
            ("findings", "document.querySelector('#findings').scrollWidth > innerWidth"),
        )
        if page.evaluate(test)
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_fits_and_names_keep_their_end(open_page: Open, width: int) -> None:
    page = open_page(deep(), size=(width, 800)).page
    found = [f"findings: {one}" for one in wider(page)]
    for tab in ("layers", "ops", "lines", "ledger", "peak"):
        page.click(f"#tab-{tab}")
        found += [f"{tab}: {one}" for one in (*wider(page), *page.evaluate(CUT))]
        assert page.evaluate(NARROWEST) >= 60, tab
    assert found == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_fits(open_diff: Any, width: int) -> None:  # noqa: F811
    page = open_diff(*runs.pair(), size=(width, 800)).page
    found = []
    for tab in ("layers", "ops", "lines", "ledger", "peak"):
        page.click(f"#tab-{tab}")
        assert "Change" in page.locator("#rows thead").inner_text(), tab
        found += [f"{tab}: {one}" for one in (*wider(page), *page.evaluate(CUT))]
    assert found == []


def test_less_important_columns_go_first(open_page: Open) -> None:
    page = open_page(runs.limited(), "#tab=layers", size=(1920, 900)).page
    shown = {}
    for width in (1920, 1280, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        shown[width] = page.locator("#rows thead [data-sort]:visible").evaluate_all("a => a.map(e => e.dataset.sort)")
    assert shown[1920] == ["layer", "forward", "backward", "limit", "reached", "bound", "ratio", "saved", "share"]
    assert shown[1280] == ["layer", "forward", "backward", "limit", "bound", "saved", "share"]
    assert shown[1024] == ["layer", "forward", "backward", "saved", "share"]
    assert shown[390] == ["layer", "backward", "share"]
    page.keyboard.press("4")  # the metric's own column stays
    assert page.locator("#rows thead [data-sort]:visible").evaluate_all("a => a.map(e => e.dataset.sort)")[1] == "saved"


@pytest.mark.parametrize("tab", ["layers", "lines"])
def test_times_of_a_table_have_one_unit(open_page: Open, tab: str) -> None:
    page = open_page(runs.limited(), f"#tab={tab}", size=(1920, 900)).page
    heads = [words.split("\n")[0] for words in page.locator("#rows thead th").all_inner_texts()]
    units = {words.split()[-1] for words in heads if words.split()[0] in ("Forward", "Backward", "Limit")}
    assert len(units) == 1


def test_the_peak_is_told_of_folded_layers_where_the_table_folds(open_page: Open) -> None:
    run = runs.gpt()
    assert run.memory is not None
    memory = dataclasses.replace(run.memory, peak_layer="transformer.h.11.attn")
    page = open_page(dataclasses.replace(run, memory=memory), "#tab=peak", size=(1920, 1000)).page
    words = page.locator(".timeline > .note").last
    first = page.locator("#rows tbody tr >> nth=0")
    assert " of transformer.h.*.attn (" in words.inner_text()
    owner, share = first.locator(".name").inner_text(), first.locator(".share").inner_text()
    assert f"Most is held by {owner}: " in words.inner_text() and share in words.inner_text()
    page.keyboard.press("m")
    assert " of transformer.h.11.attn (" in words.inner_text() and "h.*" not in words.inner_text()


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_a_device_and_of_buckets_fit(open_page: Open, width: int) -> None:
    page = open_page(runs.device(), size=(width, 800)).page
    for tab in ("device", "buckets"):
        page.click(f"#tab-{tab}")
        assert wider(page) == [], tab


def test_the_device_is_told_as_in_the_terminal(open_page: Open) -> None:
    run = runs.device()
    assert run.device is not None and run.buckets is not None
    page = open_page(run).page
    page.click("#tab-device")
    times = page.eval_on_selector_all("#rows tbody tr", "rows => rows.map((row) => row.innerText)")
    assert len(times) == sum(getattr(run.device, name) > 0 for name in run.device.PARTS)
    assert "collectives between ranks 9.00 ms, of which 4.00 ms overlap nothing else" in page.inner_text("#summary")
    page.click("#tab-buckets")
    rows = page.eval_on_selector_all("#rows tbody tr", "rows => rows.map((row) => row.innerText)")
    assert len(rows) == len(run.buckets)
    assert "transformer.wte" in rows[1] and "7000.0" in rows[1]


def test_runs_without_a_device_have_no_tab_for_it(open_page: Open) -> None:
    page = open_page(runs.gpt()).page
    assert page.query_selector("#tab-device") is None and page.query_selector("#tab-buckets") is None
