"""What each pass has its profiler's rows read by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradscope.compat import release_profiler
from gradscope.tables import EventTable
from gradscope.trace.events import read_trace
from gradscope.trace.memory import read_memory_trace


class TraceReader:
    """Reads stopped profilers, and lets go of what they hold.

    Args:
        device: the traces may hold device activities; None: where CUDA is in use when one is read.
    """

    def __init__(self, *, device: bool | None = None) -> None:
        self._device = device

    def timed(self, profiler: Any, *, calls: bool = True) -> EventTable:
        """The rows of steps that were timed; ``calls`` as in :func:`gradscope.trace.events.read_trace`."""
        return self._read(read_trace, profiler, device=self._on_device(), calls=calls)

    def surveyed(self, profiler: Any, *, shapes: bool, flops: bool) -> EventTable:
        """The rows of the survey; with FLOPs, whose markers lie inside of ops, all of them."""
        return self._read(read_trace, profiler, device=self._on_device(), shapes=shapes, whole=flops)

    def memory(self, profiler: Any) -> EventTable:
        """The rows of the memory pass, with its allocations."""
        return self._read(read_memory_trace, profiler)

    def _read(self, read: Callable[..., EventTable], profiler: Any, **how: Any) -> EventTable:
        table = read(profiler, **how)
        release_profiler(profiler)
        return table

    def _on_device(self) -> bool:
        return torch.cuda.is_initialized() if self._device is None else self._device
