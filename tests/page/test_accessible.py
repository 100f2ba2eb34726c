"""The page by axe-core's rules, light and dark, in every tab; and the flame's own text, which axe cannot see."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gradscope.fixing.report import FixReport
from gradscope.report.page import bundle
from tests.fixing.fix_fixtures import fixed_fixture, folder_fixture, gains_fixture  # noqa: F401 (used by their names)
from tests.page import runs
from tests.page.conftest import Open
from tests.page.test_roofline import known
from tests.page.test_source import TEXT, measured
from tests.page.test_whatif import estimated

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "build" / "web" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture
def axe() -> str:
    """axe-core's script, which ``make web`` installs."""
    if not AXE.exists():
        reason = "axe-core is not installed: make web"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return AXE.read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1400, 900), (900, 700)])
def test_axe_finds_nothing(open_page: Open, axe: str, scheme: str, size: tuple[int, int]) -> None:
    page = open_page(runs.gpt(), "#select=layer/transformer.h.3.attn", size, scheme=scheme).page
    page.evaluate(axe)
    found = []
    for tab in ("layers", "ops", "lines", "ledger", "peak"):
        page.click(f"#tab-{tab}")
        found += [f"{tab}: {one}" for one in _violations(page)]
    page.keyboard.press("?")
    assert found + _violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_findings(open_page: Open, axe: str, scheme: str) -> None:
    run = runs.device()
    findings = [dataclasses.replace(one, advice="Do it.", code="x = 1") for one in run.findings]
    page = open_page(dataclasses.replace(run, findings=tuple(findings)), "", scheme=scheme).page
    assert page.locator("#findings .findings > li").count() == len(findings)
    page.evaluate(axe)
    assert _violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_roofline_nor_in_what_if_nor_in_source(
    open_page: Open, axe: str, scheme: str, tmp_path: Path
) -> None:
    page = open_page(known(), "#tab=roofline", scheme=scheme).page
    page.evaluate(axe)
    assert page.locator("#roofline circle").count() and _violations(page) == []
    page = open_page(estimated()[0], scheme=scheme).page
    page.evaluate(axe)
    page.click(".what-if")
    assert _violations(page) == []
    path = tmp_path / "net.py"
    path.write_text(TEXT)
    page = open_page(measured(path), "#tab=source&select=layer/transformer.h.0.attn", scheme=scheme).page
    page.evaluate(axe)
    assert page.locator("#source tr").count() and _violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_a_fix(fixed: FixReport, tmp_path: Path, open_page: Open, axe: str, scheme: str) -> None:
    path = fixed.to_html(tmp_path / "fix.html")
    assert path is not None
    page = open_page(path, scheme=scheme).page
    page.evaluate(axe)
    assert page.locator("#fixed table").count() and _violations(page) == []


def test_on_paper_a_fix_comes_before_the_findings(fixed: FixReport, tmp_path: Path, open_page: Open) -> None:
    path = fixed.to_html(tmp_path / "fix.html")
    assert path is not None
    page = open_page(path, "#tab=layers", size=(794, 1123)).page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    tops = [page.locator(one).bounding_box()["y"] for one in ("#fixed", "#findings", "canvas")]
    assert tops == sorted(tops)
    assert not page.locator("#fixed .copy").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_selection_is_announced_in_one_line(open_page: Open) -> None:
    page = open_page(runs.gpt(), "#tab=layers").page
    said = page.locator("#said")
    assert said.get_attribute("role") == "status" and said.inner_text() == ""
    live = page.locator("[aria-live]:not(.spoken), [role=status]").evaluate_all("all => all.map(one => one.id)")
    assert sorted(live) == ["found", "said"]  # the details are not read out
    page.click("#rows .name:has-text('lm_head')")
    assert said.inner_text() == "lm_head, 905 ms, 7.2 %"
    page.focus("canvas")
    page.keyboard.press("ArrowUp")
    assert said.inner_text().startswith("GPT, ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_chosen_shows_in_forced_colours(open_page: Open, scheme: str) -> None:
    page = open_page(runs.gpt(), "#tab=layers&select=layer/lm_head", scheme=scheme).page
    outline = "(one) => getComputedStyle(document.querySelector(one)).outlineStyle"
    chosen = ("#tab-layers", ".card[aria-pressed=true]", "tr.marked th")
    assert {page.evaluate(outline, one) for one in chosen} == {"none"}
    page.emulate_media(forced_colors="active")
    assert {page.evaluate(outline, one) for one in chosen} == {"solid"}
    colours = page.evaluate(
        "[...document.querySelectorAll('.key .swatch')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("tab", ["layers", "findings"])
def test_on_paper_findings_come_first_and_nothing_is_to_be_clicked(open_page: Open, tab: str) -> None:
    opened = open_page(runs.device(), f"#tab={tab}", size=(794, 1123), scheme="dark")
    page = opened.page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    tops = [page.locator(one).bounding_box()["y"] for one in ("#findings", "canvas", ".details")]
    assert tops == sorted(tops)
    for one in (".tabs", "#query", "#theme", ".copy", "#csv", "#merged", "#headline"):
        assert not page.locator(one).first.is_visible(), one
    assert page.locator("#rows").is_visible() == (tab == "layers")
    if tab == "layers":
        rows = page.locator("#rows")
        assert rows.evaluate("one => one.scrollHeight <= one.clientHeight + 1 && one.scrollWidth <= one.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.locator("canvas").bounding_box()["width"] == 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("canvas").bounding_box()["width"] > 740


def _violations(page: Any) -> list[str]:
    result = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [f"{rule['id']}: {node['html'][:200]}" for rule in result["violations"] for node in rule["nodes"][:3]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_frames_can_be_read(open_page: Open, scheme: str) -> None:
    """Contrast of at least 4.5:1 between the frames' text and every colour that a frame can have."""
    page = open_page(runs.gpt(), scheme=scheme).page
    style = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    text = _luminance(page.evaluate(style, "--frame-text"))
    source = bundle.web_file("layertypes.js")
    types = [f"--type-{key}" for key in re.findall(r'key: "(\w+)"', source)]
    assert len(types) == 11
    scales = [f"--{scale}-{end}" for scale in ("ratio", "change") for end in ("low", "middle", "high")]
    names = [*types, *scales, "--panel"]
    contrast = {name: _contrast(text, _luminance(page.evaluate(style, name))) for name in names}
    assert {name: value for name, value in contrast.items() if value < 4.5} == {}


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
