"""What the system does for the process while unprofiled steps run: pages that it hands out, and its own time."""

from __future__ import annotations

import os
import sys
from typing import Any

if sys.platform != "win32":
    import resource


# Settings of glibc's allocator that keep freed memory, and allocators that replace it.
_KEEPING = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


class FaultMeter:
    """Notes what the process's threads asked of the system between :meth:`start` and :meth:`stop`, of each step."""

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None
        self._steps: list[tuple[int, float]] = []

    def start(self) -> None:
        """A step begins."""
        self._began = _usage()

    def stop(self) -> None:
        """It has ended."""
        now = _usage()
        if self._began is not None and now is not None:
            self._steps.append((now[0] - self._began[0], now[1] - self._began[1]))
        self._began = None

    def facts(self) -> dict[str, Any]:
        """``page_faults`` (minor ones) and ``system_ns`` of the step that had the fewest; empty: nothing was measured.

        The fewest, for at first the heap grows. The time is that of all threads together. ``kept``: whether the
        environment asks for an allocator that keeps freed memory.
        """
        if not self._steps:
            return {}
        faults, system = min(self._steps)
        preloaded = os.environ.get("LD_PRELOAD", "")
        kept = any(name in os.environ for name in _KEEPING) or any(name in preloaded for name in _ALLOCATORS)
        return {"page_faults": faults, "system_ns": round(system * 1e9), "kept": kept}


def _usage() -> tuple[int, float] | None:
    if sys.platform == "win32":
        return None
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_minflt, found.ru_stime
