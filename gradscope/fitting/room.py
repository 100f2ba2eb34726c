"""How much memory is free, so that measuring a small batch does not bring the machine down."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import torch

from gradscope import units
from gradscope.errors import WorkloadError

_SHARE = 0.9  # of what is free; the rest is for what the step does not account for


def free_bytes(device: torch.device) -> int | None:
    """Memory that a step on ``device`` may take now; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def lacks_room(size: int, peaks: Mapping[int, int], device: torch.device) -> str | None:
    """Why a step at ``size`` is not tried; None where it may be.

    Args:
        peaks: of the sizes measured so far.
    """
    free = free_bytes(device)
    if not peaks or free is None:
        return None
    needed = _expected(size, peaks)
    # What the model holds between steps is in use already.
    if needed - min(peaks.values()) <= _SHARE * free:
        return None
    return f"a step at batch size {size} would take about {units.size(needed)}, and {units.size(free)} are free"


def require_room(size: int, peaks: Mapping[int, int], device: torch.device) -> None:
    """Raise :class:`WorkloadError` if :func:`lacks_room` says why not."""
    reason = lacks_room(size, peaks, device)
    if reason is not None:
        raise WorkloadError(f"{reason}.\nMeasure smaller batches: --measure 1,2,3")


def _expected(size: int, peaks: Mapping[int, int]) -> int:
    known = sorted(peaks)
    last = known[-1]
    if len(known) == 1:
        return peaks[last] * size // last
    slope = (peaks[last] - peaks[known[0]]) / (last - known[0])
    return round(peaks[last] + max(slope, 0) * (size - last))
