"""The roofline of the page: a dot for each layer of which the work is known, below the machine's ceilings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gradscope.tables import RunData
from tests.page import runs
from tests.page.conftest import Open

FLOPS, BYTES = 200e9, 20e9


def known() -> RunData:
    """A run whose linear layers compute 50 FLOPs a byte, at 100 GFLOP/s."""
    run = runs.limited()
    layers = []
    for row in run.layers:
        flops = 100 * (row.forward_self_ns + row.backward_self_ns) if row.class_name == "Linear" else 0
        layers.append(dataclasses.replace(row, forward_flops=0, backward_flops=flops, bytes=flops // 50))
    environment = {**run.environment, "limit_dtype": "float32", "limit_flops": FLOPS, "limit_bytes": BYTES}
    return dataclasses.replace(run, layers=layers, environment=environment)


def numbers(circle: Any) -> tuple[float, float]:
    return float(circle.get_attribute("cx")), float(circle.get_attribute("cy"))


def test_dots_lie_where_their_work_puts_them(open_page: Open) -> None:
    page = open_page(known(), "#tab=roofline").page
    dots = page.query_selector_all("#roofline circle.dot")
    linear = {row.path for row in known().layers if row.class_name == "Linear"}
    assert 0 < len(dots) <= len(linear)
    points = page.get_attribute("#roofline .roof", "points").split()
    corners = [tuple(map(float, point.split(","))) for point in points]
    (left, _), (knee, roof), (right, flat) = corners
    assert roof == flat
    # Of x a decade is as wide as of the knee at 10 FLOPs a byte; of y the dots are half of the roof.
    decade = (right - knee) / round((right - knee) / ((knee - left) or 1)) if knee > left else None
    for dot in dots:
        x, y = numbers(dot)
        assert y > roof  # below it
        assert x > knee
        if decade:
            assert x - knee == pytest.approx(decade * math.log10(5), rel=0.01)
    title = page.inner_html("#roofline circle.dot title")
    assert "100 GFLOP/s at 50 FLOPs per byte" in title


def test_a_click_on_a_dot_selects_its_layer(open_page: Open) -> None:
    opened = open_page(known(), "#tab=roofline")
    page = opened.page
    assert page.locator("#roofline circle.marked").count() == 0
    page.locator("#roofline circle.dot").last.click()
    assert "select=layer" in opened.state()
    assert page.locator("#roofline circle.marked").count() >= 1
    # What the pointer is told stands below the picture too, for those who have none.
    assert "100 GFLOP/s at 50 FLOPs per byte" in page.inner_text("#roofline")


def test_the_ceilings_have_their_figures(open_page: Open) -> None:
    text = open_page(known(), "#tab=roofline").page.text_content("#roofline svg")
    assert "20.0 GB/s" in text and "float32 matmul 200" in text


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window(open_page: Open, size: tuple[int, int], scheme: str) -> None:
    page = open_page(known(), "#tab=roofline", size=size, scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box, picture = page.locator("#roofline").bounding_box(), page.locator("#roofline svg").bounding_box()
    assert picture["width"] <= box["width"]


def test_there_is_none_without_ceilings(open_page: Open) -> None:
    assert open_page(runs.limited()).page.locator("#tab-roofline").count() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit_flops": 1e308, "limit_bytes": 1e-5},
        {"limit_flops": "5"},
        {"limit_flops": True},
        {"limit_bytes": 0},
        {"limit_bytes": -1.0},
        {"limit_dtype": 7},
        {"limit_dtype": None},
    ],
)
def test_a_damaged_ceiling_has_no_roofline(open_page: Open, wrong: dict[str, Any]) -> None:
    run = known()
    environment = {key: value for key, value in {**run.environment, **wrong}.items() if value is not None}
    page = open_page(dataclasses.replace(run, environment=environment)).page
    assert page.locator("#tab-roofline").count() == 0 and page.locator("#tab-layers").count() == 1
