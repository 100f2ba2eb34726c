"""What the reader of a flame graph wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gradscope.errors import UsageError

FlameMetric = Literal["backward", "forward", "both", "saved"]


@dataclass(frozen=True, slots=True)
class FlameOptions:
    """The options of ``flamegraph``, of a report and of a comparison.

    ``metric``: what the width of a frame is its part of. ``merge``: draw repeated blocks as one frame with their sum.
    ``min_percent``: what is below this share of the whole is drawn together, as "other". ``max_frames``: the most
    frames that are drawn; plotly takes seconds for thousands. ``title``: plain text instead of the usual title.

    Raises :class:`UsageError` for values without a meaning.
    """

    metric: FlameMetric = "backward"
    merge: bool = True
    min_percent: float = 0.1
    max_frames: int = 300
    title: str | None = None

    def __post_init__(self) -> None:
        if self.metric not in get_args(FlameMetric):
            raise UsageError(f"metric must be one of {', '.join(get_args(FlameMetric))}; got {self.metric!r}.")
        if not isinstance(self.merge, bool):
            raise UsageError(f"merge must be True or False; got {self.merge!r}.")
        if isinstance(self.max_frames, bool) or not isinstance(self.max_frames, int) or self.max_frames < 2:
            raise UsageError(f"max_frames must be a whole number, 2 or more; got {self.max_frames!r}.")
        if not isinstance(self.min_percent, int | float) or not 0 <= self.min_percent <= 100:
            raise UsageError(f"min_percent must be between 0 and 100; got {self.min_percent!r}.")
        if self.title is not None and not isinstance(self.title, str):
            raise UsageError(f"title must be a string, or None for the usual one; got {self.title!r}.")
