"""What the reader of a comparison wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gradscope.errors import UsageError

DiffSort = Literal["step", "backward", "forward", "ratio", "memory"]


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What is shown, and in which order.

    ``sort``: layers by the size of their effect on the step (forward and backward together), by that of their
    backward or forward alone, by the ratio of their backward times, or the tables of memory first. ``top``: rows of
    each table. ``min_percent``: changes whose effect is below this share of the step are summed up. ``within_noise``:
    list also the layers whose difference may be noise.

    Raises :class:`UsageError` for values without a meaning.
    """

    sort: DiffSort = "step"
    top: int = 20  # with the totals they fit a screen
    min_percent: float = 0.1  # what is less reads 0.0 % in its column
    within_noise: bool = False

    def __post_init__(self) -> None:
        if self.sort not in get_args(DiffSort):
            raise UsageError(f"sort must be one of {', '.join(get_args(DiffSort))}; got {self.sort!r}.")
        if self.top < 1:
            raise UsageError(f"top must be 1 or more; got {self.top}.")
        if not 0 <= self.min_percent <= 100:
            raise UsageError(f"min_percent must be between 0 and 100; got {self.min_percent:g}.")
