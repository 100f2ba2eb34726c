"""The most memory that a piece of work holds at one moment, beyond what lived when it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradscope.compat import kineto_events, new_profiler, start_memory_profiler, stop_profiler

_COUNTED = "gradscope: the run that is counted"


def peak_bytes(work: Callable[[], object], device: torch.device, *, settled: bool = False) -> int:
    """Peak of ``work`` above its start, in bytes of torch's allocator; it runs twice, the second counts.

    Where it is ``settled``, it ran before and releases nothing that it did not allocate, once is enough.
    """
    return peaks_bytes([work], device, settled=settled)[0]


def peaks_bytes(works: Sequence[Callable[[], object]], device: torch.device, *, settled: bool = False) -> list[int]:
    """:func:`peak_bytes` of each, in one go: starting the profiler takes longer than a small step."""
    if device.type == "cuda":
        return [_on_cuda(work, device, settled=settled) for work in works]
    profiler = new_profiler(memory=True)
    kept = start_memory_profiler(profiler)
    try:
        for index, work in enumerate(works):
            if not settled:
                work()  # the profiler sees the release of that alone whose allocation it has seen
            with torch.profiler.record_function(f"{_COUNTED} {index}"):
                work()
    finally:
        stop_profiler(profiler)
    del kept
    events = kineto_events(profiler)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name().startswith(_COUNTED)}
    return [_most(changes, *spans[f"{_COUNTED} {index}"]) for index in range(len(works))]


def _most(changes: list[tuple[int, int]], start: int, end: int) -> int:
    now = most = 0
    for when, change in changes:
        if start <= when < end:
            now += change
            most = max(most, now)
    return most


def _on_cuda(work: Callable[[], object], device: torch.device, *, settled: bool) -> int:
    if not settled:
        work()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
