"""Memory over the step on the page: its data, and the chart in a browser."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from gradscope.report.page import bundle, to_html
from gradscope.report.page.data import page_record
from gradscope.report.page.memorydata import SPANS, TIMELINE_POINTS, longest, steps, thin
from gradscope.report.page.writer import to_script_json
from gradscope.tables import LayerSpan, MemoryInfo, RunData, TimelinePoint
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures
from tests.page import runs
from tests.page.conftest import Open

KINDS = {
    "weights": ("parameters", "buffers", "optimizer state"),
    "gradients": ("gradients",),
    "saved": ("saved activations",),
    "temporary": ("other activations", "activation gradients", "temporaries"),
    "rest": ("inputs", "other tensors"),
}
ATTENTION = "#select=layer/transformer.h.3.attn"


def memory_of(run: RunData) -> MemoryInfo:
    assert run.memory is not None
    return run.memory


def old(run: RunData) -> RunData:
    """The run as a gradscope wrote it that knew neither categories nor spans."""
    memory = dataclasses.replace(memory_of(run), categories=None, spans=None, spans_left_out=None)
    return dataclasses.replace(run, memory=memory)


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def test_a_long_timeline_keeps_its_extremes() -> None:
    points = [TimelinePoint(i, (i * 7919) % 10_007) for i in range(30_000)]
    points[12_345] = TimelinePoint(12_345, 99_999)
    kept = list(thin(points, TIMELINE_POINTS))
    assert len(kept) <= TIMELINE_POINTS
    assert {0, 12_345, 29_999} <= set(kept) and kept == sorted(kept)
    assert list(thin(points[:5], TIMELINE_POINTS)) == [0, 1, 2, 3, 4]


def test_steps_add_up_to_the_values() -> None:
    assert steps([7, 7, 9, 0]) == [7, 0, 2, -9]
    assert steps([]) == []


def test_the_longest_spans_stay_in_order_of_time() -> None:
    spans = [LayerSpan("a", "forward", start, start + length) for start, length in ((0, 3), (10, 1), (20, 2), (30, 3))]
    assert longest(spans, 3) == [spans[0], spans[2], spans[3]]
    assert longest(spans, 4) == spans


def test_spans_without_room_are_counted() -> None:
    run = runs.gpt()
    spans = [LayerSpan("lm_head", "forward", 3 * i, 3 * i + 1 + i % 2) for i in range(SPANS + 20)]
    memory = dataclasses.replace(memory_of(run), spans=spans, spans_left_out=5)
    record = page_record([dataclasses.replace(run, memory=memory)])["runs"][0]["memory"]
    assert record["spans_left_out"] == 25
    assert {len(column) for column in record["spans"].values()} == {SPANS}
    assert sum(record["spans"]["ns"]) == sum(span.end_ns - span.start_ns for span in spans) - 20  # 20 of 1 ns


def test_columns_of_the_page_are_those_of_the_run() -> None:
    run = runs.gpt()
    memory = memory_of(run)
    record = page_record([run])
    strings, found = record["strings"], record["runs"][0]["memory"]
    assert memory.categories is not None and memory.spans is not None
    assert [strings[number] for number in found["timeline"]["category"]] == [one.category for one in memory.categories]
    for course, part in zip(memory.categories, found["timeline"]["parts"], strict=True):
        assert tuple(itertools.accumulate(part)) == tuple(course.bytes)
    starts = list(itertools.accumulate(found["spans"]["start_ns"]))
    assert starts == [span.start_ns for span in memory.spans]
    assert [strings[number] for number in found["spans"]["phase"]] == [span.phase for span in memory.spans]
    assert [run.layers[number].path for number in found["spans"]["layer"]] == [span.layer for span in memory.spans]


def test_an_old_run_has_no_categories_and_no_spans() -> None:
    found = page_record([old(runs.gpt())])["runs"][0]["memory"]
    assert "spans" not in found and set(found["timeline"]) == {"ns", "bytes"}


def test_a_page_with_full_tables_is_small() -> None:
    """A GPT-2 sized run with as many points and spans as a page holds."""
    run = runs.gpt()
    memory = memory_of(run)
    assert memory.categories is not None
    count = 400
    points = [TimelinePoint(i * 41_234_567, memory.peak_bytes - 1 - 7_654_321 * (i % 99)) for i in range(count)]
    last = memory.categories[-1].category
    parts = [
        dataclasses.replace(course, bytes=[course.bytes[0] + 123_456 * (i % 7) for i in range(count)])
        for course in memory.categories[:-1]
    ]
    rest = [point.bytes - sum(course.bytes[i] for course in parts) for i, point in enumerate(points)]
    parts.append(dataclasses.replace(memory.categories[-1], category=last, bytes=rest))
    paths = [row.path for row in run.layers]
    spans = [
        LayerSpan(paths[i % len(paths)], "backward", i * 9_876_543, (i + 1) * 9_876_543 - i % 1_000)
        for i in range(SPANS)
    ]
    full = dataclasses.replace(memory, timeline=points, categories=parts, spans=spans)
    assert len(to_html([dataclasses.replace(run, memory=full)]).encode()) < 300_000


# --------------------------------------------------------------------------------------------------------------------
# Chart
# --------------------------------------------------------------------------------------------------------------------


def by_kind(memory: MemoryInfo) -> dict[str, int]:
    """Bytes of each kind at the peak, without those that are 0."""
    sums = {key: sum(row.bytes for row in memory.at_peak if row.category in names) for key, names in KINDS.items()}
    return {key: size for key, size in sums.items() if size}


def values(page: Any, selector: str, key: str) -> dict[str, int]:
    """The exact values that elements of the page carry, by one of their attributes."""
    found = page.query_selector_all(selector)
    return {one.get_attribute(key): int(one.get_attribute("data-value")) for one in found}


def heights(page: Any, memory: MemoryInfo) -> dict[str, float]:
    """Bytes of each area just after the peak, from the shape that is drawn."""
    end = memory.phases[-1].end_ns
    found = {}
    for path in page.query_selector_all("path.kind"):
        width = float(page.locator(".chart svg").get_attribute("width"))
        x = 58 + memory.peak_ns / end * (width - 68)
        numbers = re.findall(r"([MHVZ])([\d.]*) ?([\d.]*)", path.get_attribute("d"))
        at, levels, levels_at_x = (0.0, 0.0), [], []
        for letter, first, second in numbers:
            before = at
            at = {"M": (float(first or 0), float(second or 0)), "H": (float(first or 0), at[1])}.get(
                letter, (at[0], float(first or 0)) if letter == "V" else at
            )
            levels.append(at)
            if letter == "H" and min(before[0], at[0]) <= x + 0.5 <= max(before[0], at[0]):
                levels_at_x.append(at[1])
        top, bottom = min(levels_at_x), max(levels_at_x)
        found[path.get_attribute("data-kind")] = (bottom - top) / (176 - 22 - 34) * memory.peak_bytes
    return found


@pytest.mark.browser
def test_the_areas_at_the_peak_are_what_is_held_at_the_peak(open_page: Open) -> None:
    run = runs.gpt()
    memory = memory_of(run)
    page = open_page(run).page
    page.focus(".chart")  # the crosshair starts at the peak
    kinds = by_kind(memory)
    categories = values(page, ".moment td", "data-category")
    assert sum(categories.values()) == memory.peak_bytes
    assert {key: sum(categories.get(name, 0) for name in KINDS[key]) for key in kinds} == kinds
    assert values(page, ".kinds b", "data-kind") == kinds
    pixel = memory.peak_bytes / 120
    drawn = heights(page, memory)
    for key, size in kinds.items():
        assert drawn[key] == pytest.approx(size, abs=0.2 * pixel), key


@pytest.mark.browser
def test_a_selection_is_shaded_and_named(open_page: Open) -> None:
    run = runs.gpt()
    memory = memory_of(run)
    page = open_page(run).page
    assert page.locator(".band").count() == 0 and not page.locator(".ran-when").is_visible()
    page.click("#rows button:has-text('lm_head')")
    page.locator(".band").first.wait_for(state="attached")
    assert memory.spans is not None
    own = [span for span in memory.spans if span.layer == "lm_head"]
    bands = page.query_selector_all(".band")
    found = [tuple(band.get_attribute(f"data-{key}") for key in ("phase", "start", "end")) for band in bands]
    assert found == [(span.phase, str(span.start_ns), str(span.end_ns)) for span in own]
    assert page.locator(".ran-when b").inner_text() == "lm_head"


def ran(run: RunData, inside: str) -> dict[str, int]:
    """Time in which any layer whose path fits ran, by phase."""
    spans = memory_of(run).spans
    assert spans is not None
    times: dict[str, int] = {}
    for span in spans:
        if re.fullmatch(inside, span.layer):
            times[span.phase] = times.get(span.phase, 0) + span.end_ns - span.start_ns
    return times


@pytest.mark.browser
def test_bands_hold_all_repeats_and_all_that_is_below(open_page: Open) -> None:
    run = runs.gpt()
    page = open_page(run, ATTENTION).page
    assert page.locator(".ran-when b").inner_text() == "transformer.h.*.attn ×12"
    assert values(page, ".ran-when span[data-phase]", "data-phase") == ran(run, r"transformer\.h\.\d+\.attn(\..*)?")
    assert page.locator(".band").count() == 24  # once in forward and once in backward, twelve times
    page.keyboard.press("m")  # each block of its own
    assert page.locator(".ran-when b").inner_text() == "transformer.h.3.attn"
    assert values(page, ".ran-when span[data-phase]", "data-phase") == ran(run, r"transformer\.h\.3\.attn(\..*)?")
    assert page.locator(".band").count() == 2
    page.set_viewport_size({"width": 1200, "height": 800})  # drawn again
    page.locator(".bands > :nth-child(4)").wait_for(state="attached")
    assert page.locator(".ran-when b").inner_text() == "transformer.h.3.attn"


@pytest.mark.browser
def test_the_crosshair_by_keyboard(open_page: Open) -> None:
    run = runs.gpt()
    memory = memory_of(run)
    page = open_page(run).page
    spoken = page.locator(".spoken")
    assert spoken.get_attribute("aria-live") == "polite" and spoken.inner_text() == ""
    page.focus(".chart")

    def bytes_now() -> int:
        return int(page.locator(".moment > b").get_attribute("data-value"))

    peak = next(i for i, point in enumerate(memory.timeline) if point.ns == memory.peak_ns)
    assert bytes_now() == memory.peak_bytes
    assert "GPT ran. 22.4 GB allocated: " in spoken.inner_text()
    page.keyboard.press("ArrowLeft")
    assert bytes_now() == memory.timeline[peak - 1].bytes
    before = page.locator(".crosshair").get_attribute("x1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert bytes_now() == memory.timeline[peak + 1].bytes
    assert float(page.locator(".crosshair").get_attribute("x1")) > float(before)
    page.keyboard.press("Home")
    assert bytes_now() == memory.start_bytes
    assert "0 ns, between the phases. 1.54 GB allocated: inputs 131 kB, optimizer state" in spoken.inner_text()
    page.keyboard.press("ArrowLeft")  # there is nothing before
    assert bytes_now() == memory.start_bytes
    page.keyboard.press("End")
    assert bytes_now() == memory.end_bytes
    page.keyboard.press("ArrowUp")
    assert bytes_now() == memory.peak_bytes
    page.keyboard.press("Escape")
    assert not page.locator(".moment").is_visible()
    assert page.locator(".crosshair").get_attribute("visibility") == "hidden"


@pytest.mark.browser
def test_the_crosshair_follows_the_pointer(open_page: Open) -> None:
    run = runs.gpt()
    memory = memory_of(run)
    page = open_page(run).page
    chart = page.locator(".chart svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    end = memory.phases[-1].end_ns

    def point_at(ns: int) -> None:
        page.mouse.move(box["x"] + 58 + ns / end * (box["width"] - 68), box["y"] + 90)

    assert memory.spans is not None
    head = next(span for span in memory.spans if span.layer == "lm_head" and span.phase == "backward")
    point_at((head.start_ns + head.end_ns) // 2)
    assert page.locator(".moment .ran").inner_text() == "lm_head"
    assert "backward" in page.locator(".moment").inner_text()
    assert page.locator(".spoken").inner_text() == ""  # a pointer is not followed by voice
    tip = page.locator(".moment").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 1400
    assert tip["y"] >= box["y"] + box["height"] or tip["y"] + tip["height"] <= box["y"]  # the chart stays in sight
    point_at(0)
    assert page.locator(".moment .ran").count() == 0
    page.mouse.move(5, 5)
    assert not page.locator(".moment").is_visible()


@pytest.mark.browser
def test_an_old_run_has_one_area(open_page: Open) -> None:
    run = old(runs.gpt())
    page = open_page(run, ATTENTION).page
    assert page.locator("path.area").count() == 1 and page.locator("path.kind").count() == 0
    assert page.locator(".band").count() == 0 and not page.locator(".ran-when").is_visible()
    page.focus(".chart")
    assert int(page.locator(".moment > b").get_attribute("data-value")) == memory_of(run).peak_bytes
    assert page.locator(".moment td").count() == 0


@pytest.mark.browser
def test_names_from_outside_stay_text(open_page: Open) -> None:
    run = runs.hostile()
    page = open_page(run).page
    page.focus(".chart")
    for key in ("Home", *["ArrowRight"] * 6):
        page.keyboard.press(key)
    for i in range(9):
        page.locator("#rows button.name").nth(i).click()
        assert page.locator(".timeline img, .timeline script").count() == 0
    assert page.evaluate("window.hacked") is None
    box = page.locator(".ran-when").bounding_box()
    assert box["width"] <= 1400


# --------------------------------------------------------------------------------------------------------------------
# Baseline
# --------------------------------------------------------------------------------------------------------------------

SHOW = """
const places = document.querySelector("#place");
const record = JSON.parse(document.querySelector("#record").textContent);
const run = readRun(record, 0);
const actions = { select() {}, owners() {} };
drawTimeline(places, { ...run, baseline: readRun(record, 1) }, buildTree(run, true), false, actions);
"""


def beside(chromium: Any, run: RunData, baseline: RunData) -> Any:
    """The chart alone, of a run and its baseline."""
    names = ("timeline.js", "tree.js")
    modules = {name: text for one in names for name, text in bundle._reachable(one, {})} | {"show.js": SHOW}
    page = chromium.new_page(viewport={"width": 600, "height": 500})
    page.set_content(
        f"<style>{bundle.web_file('style.css')}</style><section id=place class='panel timeline'></section>"
        f"<script type='application/json' id=record>{to_script_json(page_record([run, baseline]))}</script>"
    )
    page.evaluate(bundle.join(modules))
    return page


@pytest.mark.browser
def test_a_baseline_is_dashed_and_both_share_a_scale(chromium: Any) -> None:
    run, before = memory_fixtures.gpt(2), runs.gpt()
    small, large = memory_of(run), memory_of(before)
    page = beside(chromium, run, before)
    try:
        line = page.locator("path.baseline")
        assert int(line.get_attribute("data-peak")) == large.peak_bytes
        assert page.evaluate("getComputedStyle(document.querySelector('path.baseline')).strokeDasharray") != "none"
        assert "before, peak 22.4 GB" in page.locator(".legend").inner_text()
        ends = [float(number) for number in re.findall(r"V([\d.]+)", line.get_attribute("d"))]
        assert min(ends) == 34  # the baseline's peak is the top of the plot
        top = float(page.locator("circle.peak").get_attribute("cy"))
        assert top == pytest.approx(154 - small.peak_bytes / large.peak_bytes * 120)
    finally:
        page.close()


@pytest.mark.browser
def test_a_baseline_without_memory_is_left_out(chromium: Any) -> None:
    page = beside(chromium, runs.gpt(), fixtures.gpt(3))
    try:
        assert page.locator("path.baseline").count() == 0 and page.locator(".of-baseline").count() == 0
    finally:
        page.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_areas_stand_out_from_the_background(open_page: Open, scheme: str) -> None:
    """Contrast of at least 3:1 of areas, lines and marks, and of 4.5:1 of text."""
    page = open_page(runs.gpt(), scheme=scheme).page
    style = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    panel = _luminance(page.evaluate(style, "--panel"))
    least = {f"--memory-{key}": 3.0 for key in KINDS} | {"--accent": 3.0, "--text": 4.5, "--text-2": 4.5, "--peak": 4.5}
    contrast = {name: _contrast(panel, _luminance(page.evaluate(style, name))) for name in least}
    assert {name: value for name, value in contrast.items() if value < least[name]} == {}


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
