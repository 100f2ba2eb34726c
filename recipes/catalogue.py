"""Every recipe, and what was measured of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscope.recipes.recipe import Recipe

# In the order in which they are worth trying on a transformer.
_MODULES = (
    "attention",
    "packed_attention",
    "heads",
    "linear_cross_entropy",
    "cross_entropy",
    "gelu",
    "swiglu",
    "norm",
    "dropout",
    "rope",
    "embedding",
)


def all_recipes() -> tuple[Recipe, ...]:
    """What each recipe says about itself."""
    return tuple(importlib.import_module(f"gradscope.recipes.{name}").ABOUT for name in _MODULES)


def figures_of(name: str) -> list[Mapping[str, Any]]:
    """What benchmarks/recipes.py measured of one recipe: a row a case, with times in ms and memory in bytes."""
    text = (Path(__file__).parent / "figures.json").read_text(encoding="utf-8")
    return [row for row in json.loads(text)["figures"] if row["recipe"] == name]
