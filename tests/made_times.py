"""A clock and a count of memory that are made up, for tests of what ``fix`` keeps: no machine decides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gradscope.patching.prove import choice
from gradscope.patching.prove.choice import FEWEST_ROUNDS, Times, Way

STEP_NS, STEP_BYTES = 2_000_000, 12 << 20


@dataclass(frozen=True)
class Saves:
    """What the first group of places saves of a step of 2 ms and 12 MiB; each further one half of that before it."""

    ns: int = 0
    bytes: int = 0


BETTER = Saves(1_000_000, 8 << 20)
SLOWER = Saves(-1_000_000)
HUNGRIER = Saves(100_000, -(10 << 20))
ALIKE = Saves()


def made_times(monkeypatch: pytest.MonkeyPatch, saves: Saves = BETTER) -> Callable[[Saves], None]:
    """Every measurement of steps in turns gives these; call what is returned to set others."""
    held = [saves]

    def measured(ways: Sequence[Way], *args: Any, **kwargs: Any) -> tuple[list[Times], list[int]]:
        for way in ways:
            way.switch()  # the last state stays, as it would
        shares = [2 - 2 ** (1 - count) for count in range(len(ways))]
        times = [round(STEP_NS - held[0].ns * share) for share in shares]
        peaks = [max(round(STEP_BYTES - held[0].bytes * share), 1000) for share in shares]
        return [Times([each] * FEWEST_ROUNDS, [each] * FEWEST_ROUNDS) for each in times], peaks

    def without(works: Sequence[Any], *args: Any, **kwargs: Any) -> list[int]:
        return [STEP_BYTES - held[0].bytes * len(works)] * len(works)

    monkeypatch.setattr(choice, "measured", measured)
    monkeypatch.setattr(choice, "peaks_bytes", without)

    def use(saves: Saves) -> None:
        held[0] = saves

    return use
