"""What benchmarks/recipes.py measured of the recipes, as ``gradscope recipes NAME`` and docs/recipes show it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradscope import units

_IN_PLACE = 1_000  # times less memory is no memory at all

FILE = Path(__file__).parent / "figures.json"


@dataclass(frozen=True, slots=True)
class Figure:
    """A recipe beside what it replaces, forward and backward at one shape: medians of rounds, alternating."""

    recipe: str
    case: str
    baseline: str  # what it is compared with, in words
    device: str  # "cpu" or "cuda"
    device_name: str
    threads: int
    torch: str
    time: str
    baseline_ms: float
    recipe_ms: float
    lowest: float  # of the rounds' ratios, baseline over recipe
    highest: float
    baseline_bytes: int  # at most at one moment, beyond what lived when the step began
    recipe_bytes: int

    @property
    def machine(self) -> str:
        """Device, threads, torch and date, for what several rows share."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        return f"{self.device_name}{threads}, torch {self.torch}, {self.time[:10]}"

    @property
    def times(self) -> str:
        """``204 ms → 54.9 ms``."""
        return f"{units.ns(self.baseline_ms * 1e6)} → {units.ns(self.recipe_ms * 1e6)}"

    @property
    def faster(self) -> str:
        """``3.72× faster``, or slower; of the medians."""
        return _factor(self.baseline_ms, self.recipe_ms, "faster", "slower", "as fast")

    @property
    def range(self) -> str:
        """``3.49× to 3.99×``: the rounds' own ratios, below 1 where the recipe was slower."""
        return f"{self.lowest:.2f}× to {self.highest:.2f}×"

    @property
    def sizes(self) -> str:
        """``158 MB → 17.9 MB``."""
        return f"{units.size(self.baseline_bytes)} → {units.size(self.recipe_bytes)}"

    @property
    def leaner(self) -> str:
        """``8.86× less``, or more."""
        if self.baseline_bytes == 0 or self.recipe_bytes == 0:
            return "" if self.baseline_bytes != self.recipe_bytes else "the same"
        if self.recipe_bytes > _IN_PLACE * self.baseline_bytes:
            return "more: the other writes over its input"
        return _factor(self.baseline_bytes, self.recipe_bytes, "less", "more", "the same")


def _factor(before: float, after: float, better: str, worse: str, same: str) -> str:
    text, word = (f"{before / after:.2f}", better) if before >= after else (f"{after / before:.2f}", worse)
    return same if text == "1.00" else f"{text}× {word}"


def all_figures() -> list[Figure]:
    """Every row, in the order of its recipe's cases."""
    return [Figure(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))["figures"]]


def figures_of(recipe: str) -> list[Figure]:
    """The rows of one recipe."""
    return [figure for figure in all_figures() if figure.recipe == recipe]


def markdown(figures: Sequence[Figure]) -> str:
    """A table for each machine, and what was not measured."""
    parts = []
    for machine in dict.fromkeys(figure.machine for figure in figures):
        rows = [
            f"| {figure.case} | {figure.baseline} | {figure.times} | {figure.faster} | {figure.range} "
            f"| {figure.sizes} | {figure.leaner} |"
            for figure in figures
            if figure.machine == machine
        ]
        head = ["| case | compared with | time | | in single rounds | memory | |", "|---|---|---|---|---|---|---|"]
        parts.append("\n".join([f"{machine}:", "", *head, *rows]))
    if not figures:
        parts.append("Not measured yet.")
    elif all(figure.device == "cpu" for figure in figures):
        parts.append("Not yet run on a GPU.")
    return "\n\n".join(parts)
