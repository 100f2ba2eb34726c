"""Settings and progress of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one profile run, as the command line and :func:`gradscope.profile` take them."""

    steps: int = 5
    warmup: int = 3
    device: str = "auto"
    seed: int | None = None
    lines: bool = True
    memory: bool = True
    timing: bool = True  # False: memory alone
    run_to_end: bool = False
    ignore: Sequence[str] = ()  # rules that are left out


class Progress:
    """Told where a run is; this one shows nothing. The command line has one that draws on stderr."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Enter phase ``name`` ("warm-up", "unprofiled steps", "profiled steps", ...), of ``total`` steps if known."""

    def advance(self) -> None:
        """One step of the current phase is done."""

    def done(self) -> None:
        """The run is over, also when it failed."""
