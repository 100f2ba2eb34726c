"""The strip of steps: a bar for each that was measured, those that do not count marked."""

from __future__ import annotations

import dataclasses

import pytest

from gradscope.tables import RunData, TakenStep
from tests.page import runs
from tests.page.conftest import Open


def with_steps(*taken: TakenStep) -> RunData:
    run = runs.gpt()
    return dataclasses.replace(run, step=dataclasses.replace(run.step, taken=taken))


STEPS = (TakenStep(80_000_000, False), TakenStep(160_000_000, True), TakenStep(90_000_000, False))


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_each_step_has_a_bar_as_high_as_it_was_long(open_page: Open, size: tuple[int, int]) -> None:
    page = open_page(with_steps(*STEPS), size=size).page
    bars = page.query_selector_all(".taken span")
    heights = [bar.bounding_box()["height"] for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(0.5, abs=0.03)
    assert heights[2] / heights[1] == pytest.approx(90 / 160, abs=0.03)
    marked = [bar.get_attribute("class") == "left-out" for bar in bars]
    assert marked == [step.left_out for step in STEPS]
    assert bars[1].get_attribute("title") == "step 2: 160 ms, left out"
    words = page.inner_text(".steps h2")
    assert "3 steps, 80.0 ms to 160 ms; 1 left out: interrupted by the system" in words
    assert page.get_attribute(".taken", "aria-label") in words


def test_many_steps_fit(open_page: Open) -> None:
    page = open_page(with_steps(*STEPS * 40_000), size=(390, 844)).page
    assert page.locator(".taken span").count() == 400  # of 300 steps each
    assert page.locator(".taken span").first.get_attribute("title") == "the longest of steps 1 to 300: 160 ms, left out"
    assert "steps, 80.0 ms to 160 ms; 40" in page.inner_text(".steps h2")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("taken", [(), STEPS[:1]])
def test_one_step_has_no_strip(open_page: Open, taken: tuple[TakenStep, ...]) -> None:
    assert open_page(with_steps(*taken)).page.locator(".steps").count() == 0
