"""Settings and progress of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradscope.errors import UsageError
from gradscope.safe_text import shown_repr

MEMORY_BUDGET = 4 * 1024**3

# What torch.manual_seed takes.
_LEAST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1


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
    memory_budget: int = MEMORY_BUDGET  # bytes that the notes of one pass may take

    def __post_init__(self) -> None:
        """Raise UsageError for values that no run can have: Python takes any."""
        for name, least in (("steps", 1), ("warmup", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        check_seed(self.seed)
        for name in ("lines", "memory", "timing", "run_to_end"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be True or False.")


def check_seed(seed: object) -> None:
    """Raise UsageError for a seed that torch does not take; None leaves the random state."""
    if seed is None:
        return
    if type(seed) is not int:
        raise UsageError(f"seed is {seed!r}; it must be a whole number, or None to leave the random state.")
    if not _LEAST_SEED <= seed <= _LARGEST_SEED:
        raise UsageError(f"seed is {shown_repr(seed)}; it must be between -2**63 and 2**64 - 1, as torch's.")


class Progress:
    """Told where a run is; this one shows nothing. The command line has one that draws on stderr."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Enter phase ``name`` ("warm-up", "unprofiled steps", "profiled steps", ...), of ``total`` steps if known."""

    def advance(self) -> None:
        """One step of the current phase is done."""

    def say(self, text: str) -> None:
        """Something that the user should know now, in one line."""

    def busy(self, name: str) -> None:
        """The program does something else now that takes long, and no step ends: "compiling"; empty: it is over."""

    def done(self) -> None:
        """The run is over, also when it failed."""
