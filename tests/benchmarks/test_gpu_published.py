"""What a GPU measured, as figures of the recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradscope.recipes.figures import Figure

from .gpu_fixtures import published

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "recipes_gpu.jsonl"
WAYS = {"by hand": (4.0, 400.0, 0.0), "F.linear, F.loss": (2.0, 200.0, 0.0), "wrong": (0.1, 1.0, 1.4)}


def record(ways: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    rows = [
        {"name": f"loss, N8, C4, {way}: {what}", "value": value}
        for way, values in ways.items()
        for what, value in zip(("time", "memory", "gradient error"), values, strict=True)
    ]
    rows += [{"name": f"loss, N8, C4, {way}: spread", "value": 0.01} for way in ways]
    return {"device": "cuda", "device_name": "A", "threads": 1, "torch": "2", "time": "2026", "results": rows}


def test_beside_the_same_by_hand_and_the_fastest_that_is_right() -> None:
    found = [Figure(**row) for row in published.figures_of(record({**WAYS, "recipe": (1.0, 100.0, 0.01)}))]
    assert [(one.recipe, one.case, one.baseline, one.baseline_ms, one.recipe_ms) for one in found] == [
        ("loss", "N8, C4", "by hand", 4.0, 1.0),
        ("loss", "N8, C4", "F.linear, F.loss", 2.0, 1.0),
    ]
    assert found[1].leaner == "2.00× less" and found[1].range == "1.96× to 2.04×"


def test_a_recipe_that_was_wrong_is_left_out() -> None:
    assert published.figures_of(record({**WAYS, "recipe": (1.0, 100.0, 1.4)})) == []


def test_what_is_published_is_the_last_run() -> None:
    file = Path(__file__).parents[2] / "recipes" / "figures.json"
    shown = [row for row in json.loads(file.read_text())["figures"] if row["device"] == "cuda"]
    last = json.loads(RESULTS.read_text().splitlines()[-1])
    assert shown == published.figures_of(last)
