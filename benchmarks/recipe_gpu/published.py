"""The last line of results/recipes_gpu.jsonl as figures of the recipes: ``python benchmarks/recipe_gpu --publish``.

Each problem is compared with the same by hand, which recipes replace, and with the fastest of torch's ways and Liger.
Ways whose gradients were wrong in that run are left out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from _common import RESULTS
from _pages import write_pages

from gradscope.recipes.figures import FILE
from recipe_gpu.measure import LARGEST_ERROR

MIB = 1 << 20
_NOT_COMPARED = ("recipe", "compile")  # beginnings of ways that are no alternative, or were not measured


def publish() -> None:
    """Put the figures in place of those of a GPU, and onto the recipes' pages."""
    record = json.loads((RESULTS / "recipes_gpu.jsonl").read_text().splitlines()[-1])
    old = json.loads(FILE.read_text())["figures"]
    rows = [row for row in old if row["device"] != "cuda"] + figures_of(record)
    FILE.write_text(json.dumps({"figures": rows}, indent=1) + "\n")
    write_pages()


def figures_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one run."""
    end = ", recipe: time"
    problems: dict[str, dict[str, dict[str, float]]] = {
        result["name"].removesuffix(end): defaultdict(dict)
        for result in record["results"]
        if result["name"].endswith(end)
    }
    for result in record["results"]:
        name, _, what = result["name"].rpartition(": ")
        for problem, ways in problems.items():
            if name.startswith(problem + ", ") and what in ("time", "memory", "spread", "gradient error"):
                ways[name.removeprefix(problem + ", ")][what] = result["value"]
    machine = {name: record[name] for name in ("device", "device_name", "threads", "torch", "time")}
    found = []
    for problem, ways in problems.items():
        recipe, _, case = problem.partition(", ")
        right = {
            way: one for way, one in ways.items() if "time" in one and one.get("gradient error", 0) <= LARGEST_ERROR
        }
        ours = right.pop("recipe", None)
        others = {way: one for way, one in right.items() if not way.startswith(_NOT_COMPARED)}
        if ours is None or not others:
            continue
        fastest = min(others, key=lambda way: others[way]["time"])
        for baseline in dict.fromkeys(["by hand", fastest]):
            if baseline in others:
                row = {"recipe": recipe, "case": case, "baseline": baseline, **machine}
                found.append({**row, **_beside(others[baseline], ours)})
    return found


def _beside(other: dict[str, float], ours: dict[str, float]) -> dict[str, float]:
    ratio = other["time"] / ours["time"]
    apart = other["spread"] + ours["spread"]  # each half the distance of the quartiles, of its median
    return {
        "baseline_ms": other["time"],
        "recipe_ms": ours["time"],
        "lowest": ratio * (1 - apart),
        "highest": ratio * (1 + apart),
        "baseline_bytes": round(other["memory"] * MIB),
        "recipe_bytes": round(ours["memory"] * MIB),
    }
