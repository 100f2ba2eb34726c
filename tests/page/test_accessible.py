"""The page by axe-core's rules, light and dark, in every tab; and the flame's own text, which axe cannot see."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gradscope.report.page import bundle
from tests.page import runs
from tests.page.conftest import Open

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
