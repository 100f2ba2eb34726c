"""What if: the flame with a finding's estimated saving cut out of its layers."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest

from gradscope import units
from gradscope.tables import RunData
from tests.page import runs
from tests.page.conftest import Open, Opened
from tests.page.test_findings import found
from tests.page.test_roofline import known

SIZES = [(1280, 720), (390, 844)]


def shown(opened: Opened) -> dict[str, float]:
    """Times of the whole step beside the flame, ns; bytes of what is saved."""
    rows = opened.page.query_selector_all(".details .amounts tr[data-row]")
    return {
        row.get_attribute("data-row"): float(row.query_selector("td").get_attribute("data-value") or 0) for row in rows
    }


def estimated() -> tuple[RunData, Any]:
    """A run, and the one finding of it that has an estimate."""
    run = found()
    finding = dataclasses.replace(run.findings[-1], predicted_saving_bytes=1_000_000)
    return dataclasses.replace(run, findings=(finding,)), finding


@pytest.mark.parametrize("size", SIZES)
def test_the_saving_is_cut_out_and_comes_back(open_page: Open, size: tuple[int, int]) -> None:
    run, finding = estimated()
    opened = open_page(run, size=size)
    page, before = opened.page, shown(opened)
    button = page.locator(".what-if")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    after = shown(opened)
    cut = sum(before[name] - after[name] for name in ("Forward", "Backward"))
    assert cut == pytest.approx(finding.predicted_saving_ns, rel=1e-6)
    if "Saved memory" in before:
        assert before["Saved memory"] - after["Saved memory"] == pytest.approx(1_000_000, rel=1e-6)
    assert button.get_attribute("aria-pressed") == "true"
    assert finding.message in page.inner_text(".what-if-line") and "Estimated" in page.inner_text(".what-if-line")
    assert page.inner_text(".card[data-metric=backward] .value").startswith("≈ ")
    assert "estimated" in page.inner_text(".crumbs")
    if run.memory is not None:
        less = units.size(run.memory.peak_bytes - finding.predicted_saving_bytes)
        assert page.inner_text("#peak .value") == f"≈ {less}"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click(".what-if-line button")
    assert shown(opened) == before
    assert page.locator(".what-if-line").is_hidden() and button.get_attribute("aria-pressed") == "false"


def test_it_is_in_the_address_and_the_back_button_ends_it(open_page: Open) -> None:
    run, finding = estimated()
    opened = open_page(run)
    page, before = opened.page, shown(opened)
    page.click(".what-if")
    after, address = shown(opened), page.evaluate("location.hash")
    page.go_back()
    assert shown(opened) == before and page.locator(".what-if-line").is_hidden()
    page.go_forward()
    assert shown(opened) == after
    again = open_page(run, address)
    assert shown(again) == after and finding.message in again.page.inner_text(".what-if-line")
    nobody = open_page(run, "#whatIf=nothing")
    assert shown(nobody) == before and nobody.page.locator(".what-if-line").is_hidden()


def test_each_finding_has_its_own(open_page: Open) -> None:
    run, finding = estimated()
    two = [dataclasses.replace(finding, message=name) for name in ("First", "Second")]
    page = open_page(dataclasses.replace(run, findings=tuple(two))).page
    for button, name in zip(page.locator(".what-if").all(), ("First", "Second"), strict=True):
        button.click()
        assert page.inner_text(".what-if-line").split()[2] == name
        assert page.locator(".what-if[aria-pressed=true]").count() == 1
        assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("rule", ["a\ud800b", "a/b#c%25&d=e\u202e"])
def test_any_name_is_in_the_address(open_page: Open, rule: str) -> None:
    run, finding = estimated()
    run = dataclasses.replace(run, findings=(dataclasses.replace(finding, rule=rule),))
    page = open_page(run).page
    page.click(".what-if")
    assert open_page(run, page.evaluate("location.hash")).page.locator(".what-if-line").is_visible()


def test_no_more_is_cut_out_than_there_is(open_page: Open) -> None:
    run, finding = estimated()
    opened = open_page(
        dataclasses.replace(run, findings=(dataclasses.replace(finding, predicted_saving_bytes=10**15),))
    )
    opened.page.click(".what-if")
    assert all(value >= 0 for value in shown(opened).values())


def test_layers_that_are_not_there_have_none(open_page: Open) -> None:
    run, finding = estimated()
    layers = tuple(path[:-1] for path in finding.layers)
    page = open_page(dataclasses.replace(run, findings=(dataclasses.replace(finding, layers=layers),))).page
    assert page.locator("#findings .findings > li").count() == 1 and page.locator(".what-if").count() == 0


def test_a_search_is_of_what_is_shown(open_page: Open) -> None:
    run, finding = estimated()
    page = open_page(run, f"#query={finding.layers[0]}").page
    before = page.inner_text("#found")
    page.click(".what-if")
    assert page.inner_text("#found") != before


def test_the_ledger_stays_as_measured(open_page: Open) -> None:
    opened = open_page(estimated()[0], "#tab=ledger")
    page = opened.page
    before = page.inner_text("#rows")
    page.click("#tab-findings")
    page.click(".what-if")
    page.click("#tab-ledger")
    assert page.inner_text("#rows") == before
    with page.expect_download() as download:
        page.click("#csv")
    assert download.value.suggested_filename == "gradscope-ledger.csv"


def test_what_is_saved_from_it_says_so(open_page: Open) -> None:
    page = open_page(estimated()[0]).page
    page.click(".what-if")
    for button, name in (("#svg", "gradscope-flame-what-if.svg"), ("#png", "gradscope-flame-what-if.png")):
        with page.expect_download() as download:
            page.click(button)
        assert download.value.suggested_filename == name
    page.click("#tab-layers")
    with page.expect_download() as download:
        page.click("#csv")
    assert download.value.suggested_filename == "gradscope-layers-what-if.csv"


def test_limits_and_the_roofline_are_of_what_was_measured(open_page: Open) -> None:
    run, finding = known(), estimated()[1]
    layers = tuple(row.path for row in run.layers if row.class_name == "Linear")
    saved = run.step.wall_ns // 5
    finding = dataclasses.replace(
        finding, layers=layers, predicted_saving_ns=saved, predicted_low_ns=saved, predicted_high_ns=saved
    )
    page = open_page(dataclasses.replace(run, findings=(finding,)), "#tab=roofline").page
    places = "[...document.querySelectorAll('.dot')].map((one) => [one.cx.baseVal.value, one.cy.baseVal.value])"
    before = page.evaluate(places)
    page.click("#tab-findings")
    page.click(".what-if")
    page.click("#tab-layers")
    assert "Limit" not in page.inner_text("#rows thead")
    page.click("#tab-roofline")
    assert page.evaluate(places) == before and before


def test_only_the_layers_of_the_finding_get_shorter(open_page: Open) -> None:
    run, finding = estimated()
    opened = open_page(run, "#tab=layers&merged=false")
    page = opened.page

    def own() -> dict[str, float]:
        rows = page.query_selector_all("#rows tbody tr")
        cells = {row.query_selector("th").inner_text().split()[0]: row.query_selector("td") for row in rows}
        return {name: float(cell.get_attribute("data-value") or 0) for name, cell in cells.items()}

    before = own()
    page.click("#tab-findings")
    page.click(".what-if")
    page.click("#tab-layers")
    after = own()
    shorter = {name for name in before if after.get(name, 0) < before[name]}
    assert shorter and all(name.startswith(finding.layers) for name in shorter)


@pytest.mark.parametrize("layers", [("",), ("", "transformer.h.0.attn")])
def test_the_whole_model_has_no_what_if(open_page: Open, layers: tuple[str, ...]) -> None:
    run, finding = estimated()
    page = open_page(dataclasses.replace(run, findings=(dataclasses.replace(finding, layers=layers),))).page
    assert page.locator("#findings .findings > li").count() == 1 and page.locator(".what-if").count() == 0


def test_a_finding_without_an_estimate_has_no_what_if(open_page: Open) -> None:
    run, finding = estimated()
    none = dataclasses.replace(
        finding, predicted_saving_ns=None, predicted_low_ns=None, predicted_high_ns=None, predicted_saving_bytes=None
    )
    opened = open_page(dataclasses.replace(run, findings=(none, dataclasses.replace(finding, layers=()))))
    assert opened.page.locator(".what-if").count() == 0


def test_while_two_runs_are_compared_the_run_after_is_asked(open_page: Open, tmp_path: Path) -> None:
    from gradscope.compare import diff

    run, finding = estimated()
    before = dataclasses.replace(run, findings=())
    path = diff(before, run).to_html(tmp_path / "diff.html")
    opened = open_page(path)
    page = opened.page
    page.click("#tab-findings")
    page.click(".what-if")
    assert page.is_disabled("#compare")
    page.keyboard.press("c")
    assert "compare=false" not in opened.state()
    assert finding.message in page.inner_text(".what-if-line")
    page.click(".what-if-line button")
    assert page.is_enabled("#compare")


def test_the_flame_is_saved_as_png(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(runs.gpt())
    with opened.page.expect_download() as saved:
        opened.page.click("#png")
    path = tmp_path / saved.value.suggested_filename
    saved.value.save_as(path)
    content = path.read_bytes()
    assert path.name == "gradscope-flame.png" and content.startswith(b"\x89PNG\r\n\x1a\n")
    size = opened.page.evaluate("[document.querySelector('canvas').width, document.querySelector('canvas').height]")
    assert list(struct.unpack(">II", content[16:24])) == size
