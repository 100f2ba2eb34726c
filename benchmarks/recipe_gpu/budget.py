"""How the seconds of a run are spent: every problem is timed, and the compiler gets what is left over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_SECONDS = 3.0  # that a problem without torch.compile takes, its kernels compiled and 25 rounds timed
COMPILE_SECONDS = 12.0  # that the compiler takes at first, on 16 cores


@dataclass
class Budget:
    """The time until which a run may go on."""

    deadline: float  # of ``clock``
    clock: Callable[[], float] = time.time
    longest_compile: float = field(default=COMPILE_SECONDS)

    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self.deadline - self.clock()

    def why_no_compile(self, problems_after: int) -> str | None:
        """Why the compiler is not run, in words; None where it may be.

        Args:
            problems_after: how many problems are still to come, whose time is not to be taken.
        """
        spare = self.left() - problems_after * LEAST_SECONDS
        if spare >= self.longest_compile:
            return None
        return f"no time to compile: {max(spare, 0):.0f} s to spare, it may take {self.longest_compile:.0f}"

    def compiled_in(self, seconds: float) -> None:
        """Note how long the compiler took: that is what it may take again."""
        self.longest_compile = max(self.longest_compile, seconds)
