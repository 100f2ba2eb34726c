"""The page in a real browser: every interaction by clicks and keys, and numbers read back from its DOM."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gradscope.report.view import LEDGER_WORDS
from gradscope.tables import Ledger, RunData
from tests import report_fixtures as fixtures
from tests.page import runs
from tests.page.conftest import Open, Opened

pytestmark = pytest.mark.browser


def test_the_head_says_what_was_measured(open_page: Open) -> None:
    page = open_page(runs.gpt()).page
    assert page.title() == "GPT · examples/gpt.py:full · gradscope"
    chips = page.locator(".chips").inner_text()
    for words in ("examples/gpt.py", "float32", "AMD EPYC 7B13", "torch 2.13.0+cpu", "5 steps", "overhead ×1.03"):
        assert words in chips
    assert "holds the text of" in page.locator("footer").inner_text()


@pytest.mark.parametrize("merged", [True, False])
def test_rows_of_layers_are_the_ledger(open_page: Open, merged: bool) -> None:
    run = runs.gpt()
    opened = open_page(run, "" if merged else "#merged=false")
    while opened.page.locator(".more").count():
        opened.page.click(".more")
    assert sum(opened.values(2)) == run.step.forward_ns
    assert sum(opened.values(3)) == run.ledger.backward_ns
    assert run.memory is not None and sum(opened.values(5)) == run.memory.saved_bytes
    assert sum(opened.values(6)) == pytest.approx(1.0, abs=1e-9)


def test_each_layer_has_its_own_value(open_page: Open) -> None:
    run = runs.gpt()
    opened = open_page(run, "#merged=false")
    while opened.page.locator(".more").count():
        opened.page.click(".more")
    names = [cell.get_attribute("data-value") for cell in opened.page.query_selector_all("#rows tbody th")]
    shown = dict(zip(names, opened.values(3), strict=True))
    elided = {"transformer.h"}  # a list that is never called
    for row in run.layers:
        own = row.backward_self_ns + row.recompute_ns + row.accumulate_ns + row.gradient_sum_ns
        if row.path not in elided:
            assert shown[row.path or "GPT"] == own


def test_the_ledger_is_complete(open_page: Open) -> None:
    run = runs.device()
    opened = open_page(run)
    opened.page.click("#tab-ledger")
    names = [
        cell.get_attribute("data-value").replace(" ", "_") for cell in opened.page.query_selector_all("#rows tbody th")
    ]
    keys = {words.replace(" ", "_"): key for key, (words, _) in LEDGER_WORDS.items()}
    parts = {keys[name]: value for name, value in zip(names, opened.values(3), strict=True)}
    # Few programs have hooks: without them there is no row for what they take.
    assert parts == {name: ns for name in Ledger.PARTS if (ns := getattr(run.ledger, name)) or name != "hook_ns"}


def test_who_holds_the_peak_adds_up(open_page: Open) -> None:
    run = runs.gpt()
    assert run.memory is not None
    opened = open_page(run)
    opened.page.click("#peak")
    assert sum(opened.values(3)) == run.memory.peak_bytes
    kinds = opened.page.query_selector_all(".kinds b")
    assert sum(int(kind.get_attribute("data-value")) for kind in kinds) == run.memory.peak_bytes
    assert "select=layer/" in opened.state() or run.memory.peak_layer in (None, "")


def test_operations_and_lines_add_up(open_page: Open) -> None:
    run = runs.gpt()
    opened = open_page(run)
    opened.page.click("#tab-ops")
    backward: dict[tuple[str, str], int] = defaultdict(int)
    for op in run.ops:
        if op.phase not in ("forward", "optimizer"):
            backward[op.phase, op.name] += op.self_ns
    assert sorted(value for value in opened.values(5) if value) == sorted(value for value in backward.values() if value)
    opened.page.click("#tab-lines")
    assert sum(opened.values(5)) == run.ledger.backward_ns
    assert "F.softmax(att, dim=-1)" in opened.page.locator("#rows").inner_text()


def test_cards_switch_the_metric(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    for metric, title in (
        ("forward", "Forward time"),
        ("both", "Forward and backward time"),
        ("saved", "Saved memory"),
    ):
        opened.page.click(f"[data-metric={metric}].card")
        assert opened.page.locator(".flame h2").inner_text() == f"{title} by layer"
        assert opened.state() == f"#metric={metric}"
        assert opened.page.get_attribute(f"[data-metric={metric}].card", "aria-pressed") == "true"
    opened.page.keyboard.press("1")
    assert opened.state() == ""


@pytest.mark.parametrize(
    ("passes", "words"), [(None, "for backward"), (1, "for backward"), (6, "over 6 backward passes")]
)
def test_the_card_says_what_is_a_sum_over_passes(open_page: Open, passes: int | None, words: str) -> None:
    run = runs.gpt()
    assert run.memory is not None
    memory = dataclasses.replace(run.memory, backward_passes=passes)
    opened = open_page(dataclasses.replace(run, memory=memory))
    assert words in opened.page.locator("[data-metric=saved].card").inner_text()


def test_zoom_by_click_breadcrumb_and_keys(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    page = opened.page
    page.mouse.click(*opened.frame("3"))  # pass, GPT, transformer, the blocks
    assert opened.state() == "#zoom=layer/transformer.h.0&select=layer/transformer.h.0"
    assert page.locator(".crumbs [aria-current]").inner_text() == "h.0-h.11 ×12"
    page.click(".crumbs button:has-text('transformer')")
    assert opened.state() == "#zoom=layer/transformer&select=layer/transformer"
    page.focus("canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert opened.state() == "#zoom=layer/transformer.h.0&select=layer/transformer.h.0"
    page.keyboard.press("ArrowDown")
    selected = page.locator(".selection").inner_text()
    assert selected.startswith("attn")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".selection").inner_text().startswith("ln_1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    assert opened.state() == "#zoom=layer/transformer&select=layer/transformer"
    page.keyboard.press("Home")
    assert opened.state() == ""


def test_hover_tells_all_metrics(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    opened.page.mouse.move(*opened.frame("3"))
    tip = opened.page.locator(".tip")
    for words in ("h.0-h.11 ×12", "transformer.h.* · Block", "forward", "backward", "saved"):
        assert words in tip.inner_text()
    opened.page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_search_by_keys(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("c_attn")
    found = page.locator("#found").inner_text()
    assert " match" in found and found.endswith("%")
    names = [cell.inner_text() for cell in page.query_selector_all("#rows tbody th bdi")]
    assert names == ["transformer.h.*.attn.c_attn"]
    page.keyboard.press("Enter")
    assert "select=layer/transformer.h.0.attn.c_attn" in opened.state()
    page.keyboard.press("Escape")
    assert page.input_value("#query") == "" and page.locator("#found").inner_text() == ""
    page.fill("#query", "no such layer")
    assert "Nothing here" in page.locator("#rows").inner_text()


def test_folding_keeps_what_is_selected(open_page: Open) -> None:
    opened = open_page(runs.gpt(), "#select=layer/transformer.h.7.mlp")
    assert opened.page.locator(".bars button").count() == 12
    opened.page.click("#merged")
    assert "merged=false" in opened.state()
    assert opened.page.locator(".selection").inner_text().startswith("mlp")
    opened.page.click(".bars button >> nth=3")
    assert "select=layer/transformer.h.3.mlp" in opened.state()
    assert opened.page.get_attribute(".bars button >> nth=3", "aria-pressed") == "true"
    opened.page.focus("canvas")
    opened.page.keyboard.press("m")
    assert "merged" not in opened.state()


def test_a_repeat_unlike_the_others_is_pointed_out(open_page: Open) -> None:
    opened = open_page(fixtures.gpt(12, slow_block=7), "#select=layer/transformer.h.0.attn")
    odd = opened.page.locator(".bars .odd")
    assert odd.count() == 1
    assert "transformer.h.7.attn" in odd.get_attribute("title")
    assert "transformer.h.7.attn is unlike the others" in opened.page.locator(".details").inner_text()


def test_tables_sort_by_any_column(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    for column, key in ((2, "forward"), (3, "backward"), (5, "saved")):
        opened.page.click(f"[data-sort={key}]")
        assert opened.values(column) == sorted(opened.values(column), reverse=True)
        opened.page.click(f"[data-sort={key}]")
        assert opened.values(column) == sorted(opened.values(column))
        assert opened.page.get_attribute(f"th:has([data-sort={key}])", "aria-sort") == "ascending"


def test_rows_select_and_are_marked(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    opened.page.click("#rows .name:has-text('transformer.h.*.mlp.c_fc')")
    assert "select=layer/transformer.h.0.mlp.c_fc" in opened.state()
    assert opened.page.locator("tr.marked").count() == 1
    opened.page.click(".details .link:has-text('mlp')")
    assert opened.page.locator("tr.marked").count() > 1


def test_csv_holds_the_exact_values(open_page: Open) -> None:
    run = runs.gpt()
    opened = open_page(run)
    with opened.page.expect_download() as download:
        opened.page.click("#csv")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert download.value.suggested_filename == "gradscope-layers.csv"
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(int(row["backward_ns"]) for row in rows) == run.ledger.backward_ns


def test_the_address_brings_the_view_back(open_page: Open) -> None:
    anchor = "#metric=both&merged=false&colour=ratio&order=largest&query=mlp&tab=lines&theme=dark"
    page = open_page(runs.gpt(), anchor).page
    assert page.locator(".flame h2").inner_text() == "Forward and backward time by layer"
    assert not page.is_checked("#merged")
    assert (page.input_value("#colour"), page.input_value("#order")) == ("ratio", "largest")
    assert page.input_value("#query") == "mlp"
    assert page.get_attribute("#tab-lines", "aria-selected") == "true"
    assert page.get_attribute("html", "data-theme") == "dark"


def test_choices_of_the_toolbar(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    opened.page.select_option("#colour", "ratio")
    assert "grey ×2.00 is usual" in opened.page.locator(".legend-bar").inner_text()
    opened.page.select_option("#order", "largest")
    opened.page.select_option("#colour", "type")
    opened.page.click("[data-type=attention]")
    assert opened.state() == "#order=largest&highlight=attention"
    opened.page.click("#subtree")
    assert max(opened.values(3)) > 0.9 * runs.gpt().ledger.layers_ns
    opened.page.mouse.click(*opened.frame("3"))
    opened.page.click("#zoomed")
    names = [cell.get_attribute("data-value") for cell in opened.page.query_selector_all("#rows tbody th")]
    assert names and all(name.startswith("transformer.h.*") for name in names)


def test_light_and_dark(open_page: Open) -> None:
    opened = open_page(runs.gpt(), scheme="dark")
    assert _background(opened) == "rgb(16, 18, 22)"
    opened.page.click("#theme")
    assert _background(opened) == "rgb(243, 244, 246)"
    assert opened.state() == "#theme=light"


def _background(opened: Opened) -> Any:
    return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_keyboard_keeps_its_place(open_page: Open) -> None:
    opened = open_page(runs.gpt())
    focused = "document.activeElement.getAttribute(%r)"
    for selector, name in (("[data-metric=both].card", "data-metric"), ("[data-sort=forward]", "data-sort")):
        opened.page.focus(selector)
        value = opened.page.evaluate(focused % name)
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate(focused % name) == value
    assert opened.state() == "#metric=both&sort=-forward"
    opened.page.focus("#rows .name >> nth=2")
    opened.page.keyboard.press("Enter")
    assert "select=layer/" in opened.state()
    assert opened.page.evaluate("document.activeElement.matches('#rows .name')")
    opened.page.focus("#tab-layers")
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.evaluate("document.activeElement.id") == "tab-ops"


def test_help(open_page: Open) -> None:
    page = open_page(runs.gpt()).page
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("dialog").is_hidden()


def test_kernels_and_notes(open_page: Open) -> None:
    run = runs.device()
    opened = open_page(run)
    assert "a note" in opened.page.locator(".warnings").inner_text()
    opened.page.click("#tab-kernels")
    assert sum(opened.values(5)) == sum(row.device_ns for row in run.kernels)


def test_limits_in_the_table_and_in_full(open_page: Open) -> None:
    run = runs.limited()
    opened = open_page(run, "#tab=layers", size=(1920, 1000))
    page = opened.page
    head = page.locator("#rows thead").inner_text()
    assert all(word in head for word in ("Limit", "Reached", "Bound by"))
    assert sum(opened.values(4)) == sum(row.backward_limit_ns or 0 for row in run.layers)
    row = page.locator("#rows tbody tr", has_text="transformer.h.*.mlp.c_fc")
    assert "50 %" in row.inner_text() and "compute" in row.inner_text()
    row.locator("button").click()
    lines = [line.replace("\u00a0", " ") for line in page.locator(".limits li").all_inner_texts()]
    assert [line.partition(" ")[0] for line in lines] == ["backward", "forward"]
    assert lines[0].endswith("(50 %), bound by compute") and "at this machine’s limit" in lines[0]
    page.set_viewport_size({"width": 1300, "height": 900})  # what there is no room for is left out
    assert "Limit" in page.locator("#rows thead").inner_text()
    assert "Reached" not in page.locator("#rows thead").inner_text()
    page.click("[data-metric=saved]")
    assert "Limit" not in page.locator("#rows thead").inner_text()


def test_a_kernel_lies_below_the_operation_that_launched_it(open_page: Open) -> None:
    run = runs.device()
    path = "transformer.h.1.mlp.c_fc"
    (gemm, reduce) = (row for row in run.kernels if row.layer == path)
    opened = open_page(run, f"#merged=no&zoom=layer/{path}&select=op/{path}/backward/{gemm.op}")
    details = opened.page.locator(".details")
    assert "sgemm_nn" in details.inner_text() and "reduce_kernel" in details.inner_text()
    opened.page.locator("canvas").focus()
    opened.page.keyboard.press("ArrowDown")
    assert opened.state().endswith(f"{gemm.op}/sgemm_nn")
    assert f"launched by {gemm.op}" in details.inner_text()
    opened.page.keyboard.press("ArrowRight")
    assert opened.state().endswith(f"{reduce.op}/reduce_kernel")
    opened.page.keyboard.press("ArrowUp")
    assert opened.state().endswith(f"op/{path}/backward/{gemm.op}")


@pytest.mark.parametrize("run", [fixtures.mlp(lines=False, overhead=None), fixtures.gan()], ids=["mlp", "gan"])
def test_what_was_not_measured_is_left_out(open_page: Open, run: RunData) -> None:
    page = open_page(run, "#metric=saved&tab=peak").page
    assert page.locator(".card").count() == 3
    assert page.get_attribute("#tab-layers", "aria-selected") == "true"
    assert page.locator("#tab-peak").count() == 0
    assert "Memory was not measured" in page.locator(".timeline").inner_text()


@pytest.mark.parametrize("tab", ["ops", "kernels", "lines"])
def test_long_names_are_cut_and_not_left_out(open_page: Open, tab: str) -> None:
    run = runs.device()
    long = "aten::" + "_a_name_that_no_column_has_room_for" * 6
    ops = [dataclasses.replace(op, name=long + str(i)) for i, op in enumerate(run.ops)]
    kernels = [dataclasses.replace(row, name=long + str(i), op=None) for i, row in enumerate(run.kernels)]
    run = dataclasses.replace(run, ops=ops, kernels=kernels)
    opened = open_page(run, f"#tab={tab}", (900, 700))
    sticking_out = opened.page.evaluate(
        """[...document.querySelectorAll("#rows tbody th")].filter((cell) => {
          const name = cell.querySelector(".name").getBoundingClientRect();
          return name.right > cell.getBoundingClientRect().right || name.width < 40;
        }).length"""
    )
    assert sticking_out == 0


def test_without_source(open_page: Open) -> None:
    opened = open_page(runs.gpt(), "#tab=lines", source=False)
    assert "No text of your source code" in opened.page.locator("footer").inner_text()
    assert "--no-source" in opened.page.locator("#summary").inner_text()
    assert "softmax(" not in opened.page.content()


def test_hostile_names_do_nothing(open_page: Open) -> None:
    opened = open_page(runs.hostile(), "#merged=false")
    page = opened.page
    for tab in ("layers", "ops", "lines", "ledger", "peak"):
        page.click(f"#tab-{tab}")
    page.click("#tab-layers")
    for i in range(page.locator("#rows .name").count()):
        page.locator("#rows .name").nth(i).click()
    page.mouse.move(*opened.frame("1"))
    page.keyboard.press("4")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    shown = page.locator("body").inner_text()
    assert "</script><script>window" in shown and "nul␀tab" in shown and "⟨U+202E⟩gnp.exe" in shown
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("size", [(1400, 900), (1010, 900), (900, 700), (480, 800)])
@pytest.mark.parametrize("run", [runs.gpt(), runs.limited()], ids=["gpt", "limited"])
def test_nothing_is_wider_than_the_window(open_page: Open, run: RunData, size: tuple[int, int]) -> None:
    page = open_page(run, size=size).page
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
