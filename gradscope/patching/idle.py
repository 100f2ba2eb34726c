"""Why a place is left alone although a recipe could take it: ``backend="auto"`` would run torch's own there."""

from __future__ import annotations

from gradscope.kernels import pays
from gradscope.recording.graph import Value


def why_idle(recipe: str, on: Value, **amounts: int) -> str:
    """Why the recipe gains nothing at these sizes on the CPU; empty where it may, and on other devices.

    Args:
        recipe: as kernels/pays.py names its rule.
        on: any tensor of the place.
        amounts: of the units of that rule.
    """
    if on.device.type != "cpu":
        return ""
    return pays.against(recipe, **amounts) or ""
