"""Every recipe."""

from __future__ import annotations

import importlib

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
