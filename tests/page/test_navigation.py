"""Ways through the page: history, the wheel, searches, and what is saved from it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests import report_fixtures as fixtures
from tests.page import runs
from tests.page.conftest import Open, Opened
from tests.page.test_findings import found

pytestmark = pytest.mark.browser


def test_the_back_button_undoes_tab_selection_and_zoom(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    page = opened.page
    page.click("#tab-ops")
    page.mouse.click(*opened.frame("3"))
    page.keyboard.press("2")  # the metric is how it is looked at: no step of its own
    zoomed = opened.state()
    page.click("#tab-layers")
    page.go_back()
    assert opened.state() == zoomed and page.get_attribute("#tab-ops", "aria-selected") == "true"
    assert page.locator(".selection").inner_text().startswith("h.0-h.11")
    page.go_back()
    assert opened.state() == "#tab=ops" and page.locator(".selection").inner_text().startswith("GPT")
    page.go_back()
    assert opened.state() == "" and page.get_attribute("#tab-layers", "aria-selected") == "true"
    page.go_forward()
    assert opened.state() == "#tab=ops"


def test_keys_in_a_row_are_one_step_back(open_page: Open) -> None:
    opened = open_page(runs.gpt(), "#metric=both")
    opened.page.focus("canvas")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
        opened.page.keyboard.press(key)
    assert "select=layer/transformer" in opened.state()
    opened.page.go_back()
    assert opened.state() == "#metric=both"


def wheel(opened: Opened, turned: int) -> None:
    opened.page.mouse.move(*opened.frame("4"))
    opened.page.mouse.wheel(0, turned)
    opened.page.wait_for_timeout(100)


def test_the_wheel_zooms_by_a_level(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    page = opened.page
    wheel(opened, -100)
    assert opened.state() == ""  # it would be in the way of scrolling
    page.keyboard.down("Control")
    seen = []
    for turned in (-100, -100, -100, 100):
        wheel(opened, turned)
        seen.append(opened.state().partition("&")[0])
    page.keyboard.up("Control")
    assert seen == ["#zoom=layer/", "#zoom=layer/transformer", "#zoom=layer/transformer.h.0", "#zoom=layer/transformer"]
    page.focus("canvas")
    wheel(opened, 100)
    assert opened.state().startswith("#zoom=layer/&")
    page.go_back()  # all turns in a row were one step
    assert opened.state() == ""


def test_a_search_counts_in_every_tab(open_page: Open) -> None:
    opened = open_page(found())
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("attn")
    tabs = page.locator(".tabs button").all_inner_texts()
    counts = dict(text.rsplit(" ", 1) for text in tabs if text[-1].isdigit())
    assert set(counts) == {"Findings", "Layers", "Ops", "Kernels", "Lines"}
    assert int(counts["Findings"]) == page.locator("#findings .findings > li:visible").count() > 0
    for key in ("layers", "ops", "lines"):
        page.click(f"#tab-{key}")
        assert page.locator("#rows tbody tr:not(.rest)").count() == int(counts[key.title()]), key
    page.fill("#query", "no such thing")
    page.click("#tab-findings")
    assert page.locator("#findings").inner_text().endswith("No finding fits the search.")
    page.fill("#query", "")
    assert page.locator(".tabs button").all_inner_texts()[:2] == ["Findings", "Layers"]


def test_in_a_large_tree_a_letter_waits_for_no_search(open_page: Open) -> None:
    """The search follows when the typing pauses; Enter does not wait for that."""
    page = open_page(fixtures.many_modules(), "#merged=false&tab=layers").page
    page.focus("#query")
    at_once = page.evaluate(
        """() => {
            const query = document.querySelector("#query");
            query.value = "no such thing";
            query.dispatchEvent(new Event("input", { bubbles: true }));
            return document.querySelector("#found").textContent;
        }"""
    )
    assert at_once == ""
    page.wait_for_selector("#found:has-text('0 matches')")
    page.fill("#query", "Norm")
    page.keyboard.press("Enter")
    assert "matches" in page.inner_text("#found") and not page.inner_text("#found").startswith("0 ")
    assert page.input_value("#query") == "Norm"


def test_regular_expressions(open_page: Open) -> None:
    page = open_page(runs.gpt(), "#tab=layers").page
    page.fill("#query", r"/mlp\.c_(fc|proj) /")
    names = sorted(page.locator("#rows tbody th .name").all_inner_texts())
    assert names == ["transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"]
    page.fill("#query", "/c_fc")
    assert page.inner_text("#found") == "0 matches · a regular expression ends with /"
    page.fill("#query", "/(/")
    assert page.inner_text("#found") == "0 matches · not a regular expression"
    assert page.locator("#found").inner_text().startswith("0 matches")


def test_a_source_line_lights_its_layer(open_page: Open) -> None:
    page = open_page(runs.gpt(), "#tab=lines").page
    page.fill("#query", "F.softmax")
    lit = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.fill("#query", "F.no_such")
    assert page.evaluate("document.querySelector('canvas').toDataURL()") != lit


def test_the_flame_as_svg(open_page: Open) -> None:
    page = open_page(runs.hostile(), "#merged=false").page
    with page.expect_download() as download:
        page.click("#svg")
    assert download.value.suggested_filename == "gradscope-flame.svg"
    root = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0].startswith("backward pass: ") and any("</script><script>" in one for one in titles)
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    whole = float(root.attrib["width"])
    boxes = [one.attrib for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(boxes) > 5 and all(float(one.get("x", 0)) + float(one["width"]) <= whole + 1 for one in boxes)


def test_an_operation_says_which_layers_call_it(open_page: Open) -> None:
    run = runs.gpt()
    name = "AddmmBackward0"
    opened = open_page(run, f"#select=op/lm_head/backward/{name}")
    page = opened.page
    rows = page.locator(".details .ops li")
    by_layer = {op.layer: op.self_ns for op in run.ops if op.name == name and op.phase == "backward"}
    whole = sum(by_layer.values())
    fc = sum(ns for layer, ns in by_layer.items() if layer and layer.endswith("mlp.c_fc"))
    shown = rows.filter(has_text="transformer.h.*.mlp.c_fc").inner_text()
    assert f"{100 * fc / whole:.1f} %" in shown
    rows.locator(".link:has-text('mlp.c_fc')").click()
    assert opened.state() == f"#select=op/transformer.h.0.mlp.c_fc/backward/{name}"
    page.go_back()
    assert opened.state().startswith("#select=op/lm_head/")
