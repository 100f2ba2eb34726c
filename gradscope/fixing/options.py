"""What a fix is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradscope.errors import UsageError
from gradscope.tables import Options

CURVE_STEPS = 20


@dataclass(frozen=True)
class FixOptions:
    """One fix, as the command line takes it."""

    options: Options = field(default_factory=Options)  # of the profiles before and after
    recipes: tuple[str, ...] | None = None  # None: all
    dry_run: bool = False
    curve_steps: int = CURVE_STEPS  # of a training script, whose losses are compared


def chosen_recipes(only: str | None, skip: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
    """The recipes that ``--only`` and ``--skip`` leave, in the order of ``known``; None where neither is given.

    Raises:
        UsageError: there is no such recipe, none is left, or both are given.
    """
    if only is None and skip is None:
        return None
    if only is not None and skip is not None:
        raise UsageError("--only and --skip both choose recipes: give one of them.")
    option, text = ("--only", only) if only is not None else ("--skip", skip)
    names = [name.strip() for name in str(text).split(",") if name.strip()]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None or not names:
        what = f"no recipe to patch in is called {unknown}" if names else "it names no recipe"
        raise UsageError(f"{option}: {what}.\nThere are {', '.join(known)}.")
    left = tuple(name for name in known if (name in names) == (only is not None))
    if not left:
        raise UsageError(f"--skip leaves out every recipe that there is: {', '.join(known)}.")
    return left
