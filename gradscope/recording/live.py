"""The user's live objects behind a recorded step, in one table that is dropped whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from torch import nn


class RecordedCall(NamedTuple):
    """What a torch function was called with; tensors are replaced by their values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class LiveObjects:
    """What a recording refers to of the user's, by the graph's own numbers; the graph asks here and holds none of it.

    What else the graph knows is plain: numbers, texts, shapes, code, and weak references.
    """

    calls: dict[int, RecordedCall] = field(default_factory=dict)  # by node: arguments may be any object
    callers: dict[int, nn.Module] = field(default_factory=dict)  # by node: modules that may be made for a single call
    frames: dict[int, FrameType] = field(default_factory=dict)  # by frame, until it was left
    globals: dict[int, dict[str, Any]] = field(default_factory=dict)  # by frame: the global names of its file
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)  # by frame: numbers, texts and None it began with
    modules: dict[int, nn.Module | None] = field(default_factory=dict)  # by site: whose code would change
    chains: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # by site: functions from there to the edited one

    def drop(self) -> None:
        """Let go of all of it; who asks afterwards is told of nothing."""
        for table in vars(self).values():
            table.clear()
