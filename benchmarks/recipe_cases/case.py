"""One comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[], None]  # forward and backward once; leaves no gradient behind


@dataclass(frozen=True, slots=True)
class RecipeCase:
    """A recipe beside what it replaces, at one shape."""

    recipe: str
    name: str  # "B1 H12 T1024 d64"
    baseline: str  # what is compared with: "attention by hand"
    make: Callable[[], tuple[Step, Step]]  # (baseline, recipe); allocates what both work on
    faster: float | None = None  # at least this many times faster
    leaner: float | None = None  # at least this many times less memory beyond what was there before
