"""Memory by owner, and the layers in time order below its chart."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import pytest

from gradscope.tables import LayerSpan, OwnerCourse, RunData
from tests.page import runs
from tests.page.conftest import Open, Opened

LANE = 14


def owned() -> RunData:
    """Two owners with a half and a quarter of every point, and nobody with an eighth."""
    run = runs.gpt()
    memory = run.memory
    assert memory is not None
    parts = {"transformer.h.*.attn": 2, "transformer.h.*.mlp.c_fc": 4, None: 8}
    courses = [
        OwnerCourse(owner, tuple(point.bytes // part for point in memory.timeline)) for owner, part in parts.items()
    ]
    return dataclasses.replace(run, memory=dataclasses.replace(memory, owners=courses))


def bars(opened: Opened) -> list[dict[str, float]]:
    """Place and layer of each bar of the lanes."""
    return opened.page.evaluate(
        """[...document.querySelectorAll('.lane')].map((one) => ({
            x: one.x.baseVal.value, width: one.width.baseVal.value, y: one.y.baseVal.value,
            layer: Number(one.dataset.layer)}))"""
    )


def test_without_owners_in_the_file_there_is_no_switch(open_page: Open) -> None:
    assert open_page(runs.gpt()).page.locator(".by-owner").count() == 0


def test_owners_are_stacked_and_add_up(open_page: Open) -> None:
    run = owned()
    memory = run.memory
    assert memory is not None
    page = open_page(run, size=(1400, 1400)).page
    kinds = page.locator(".kind").count()
    page.click(".by-owner")
    assert page.get_attribute(".by-owner", "aria-pressed") == "true"
    assert page.locator(".kind").evaluate_all("all => all.map((one) => one.dataset.kind)") == [
        "",
        "transformer.h.*.attn",
        "transformer.h.*.mlp.c_fc",
    ]
    shown = {
        one.get_attribute("data-kind"): int(one.get_attribute("data-value"))
        for one in page.query_selector_all(".kinds b")
    }
    peak = memory.peak_bytes
    assert shown["transformer.h.*.attn"] == peak // 2 and shown["transformer.h.*.mlp.c_fc"] == peak // 4
    assert sum(shown.values()) == peak
    page.focus(".chart")  # at the peak
    assert [one.split("\n")[0].split("\t")[0].strip() for one in page.locator(".moment tr").all_inner_texts()] == [
        "transformer.h.*.mlp.c_fc",
        "transformer.h.*.attn",
        "others",
    ]
    assert "transformer.h.*.attn" in page.inner_text(".spoken")
    attention = [row for row in memory.saved if row.layer and re.fullmatch(r"transformer\.h\.\d+\.attn", row.layer)]
    largest = max(attention, key=lambda row: row.bytes)
    notes = page.locator(".moment .note").all_inner_texts()
    assert f"{largest.node} · {largest.what}, {largest.line}" in notes
    assert page.evaluate("document.activeElement.className") == "chart"
    again = open_page(run, page.evaluate("location.hash"), size=(1400, 1400)).page
    assert again.get_attribute(".by-owner", "aria-pressed") == "true"
    page.click(".by-owner")
    assert page.locator(".kind").count() == kinds
    assert page.evaluate("document.activeElement.className") == "by-owner"


@pytest.mark.parametrize("width", [390, 1440])
def test_the_moment_is_seen_whole(open_page: Open, width: int) -> None:
    page = open_page(owned(), "#owners=true", size=(width, 800)).page
    page.focus(".chart")
    box = page.locator(".moment").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 800
    # No part of the page that scrolls cuts it off.
    assert page.locator(".moment").evaluate("one => getComputedStyle(one).position") == "fixed"


def test_a_layer_runs_while_one_below_it_does(open_page: Open) -> None:
    opened = open_page(runs.gpt(), size=(1400, 1400))
    found = bars(opened)
    assert found
    run = runs.gpt()
    paths = [row.path for row in run.layers]
    levels = {y: level for level, y in enumerate(sorted({bar["y"] for bar in found}))}
    assert [b - a for a, b in pairwise(sorted(levels))] == [LANE] * (len(levels) - 1)
    for bar in found:
        level, path = levels[bar["y"]], paths[int(bar["layer"])]
        if level == 0:
            continue
        above = [
            one
            for one in found
            if levels[one["y"]] == level - 1
            and one["x"] - 0.6 <= bar["x"]
            and bar["x"] + bar["width"] <= one["x"] + one["width"] + 1.2
        ]
        assert any(path.startswith(paths[int(one["layer"])]) for one in above), path
    for y in levels:
        lane = sorted((bar["x"], bar["width"]) for bar in found if bar["y"] == y)
        assert all(x + width <= after + 0.6 for (x, width), (after, _) in pairwise(lane))


def test_the_lanes_lie_on_the_time_of_the_chart(open_page: Open) -> None:
    run = runs.gpt()
    memory = run.memory
    assert memory is not None
    end = memory.phases[-1].end_ns
    spans = [LayerSpan("lm_head", "forward", end // 4, end // 2), LayerSpan("lm_head", "backward", end // 2, end)]
    run = dataclasses.replace(run, memory=dataclasses.replace(memory, spans=spans))
    opened = open_page(run, size=(1400, 1400))
    line = opened.page.locator(".crosshair")
    found = [bar for bar in bars(opened) if run.layers[int(bar["layer"])].path == "lm_head"]
    opened.page.focus(".chart")
    opened.page.keyboard.press("End")
    right = float(line.get_attribute("x1"))
    first, second = found
    assert second["x"] + second["width"] == pytest.approx(right, abs=2)
    assert first["width"] == pytest.approx(second["width"] / 2, abs=1.5)  # a quarter of the step, and a half


def test_a_click_on_a_bar_selects_its_layer(open_page: Open) -> None:
    opened = open_page(runs.gpt(), "#merged=false", size=(1400, 1400))
    index = next(i for i, row in enumerate(runs.gpt().layers) if row.path == "lm_head")
    opened.page.locator(f'.lane[data-layer="{index}"]').first.click(force=True)
    assert "select=layer/lm_head" in opened.state()


@pytest.mark.parametrize("width", [390, 794, 1280])
def test_they_fit_narrow_windows(open_page: Open, width: int) -> None:
    page = open_page(owned(), size=(width, 900)).page
    page.click(".by-owner")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
