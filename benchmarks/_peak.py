"""The most memory that a step holds at one moment, beyond what lived when it began.

On a CPU by the profiler's record of torch's allocator; scratch that MKL and oneDNN take for themselves is not in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_COUNTED = "the step that is counted"


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Peak of one step above its start; another step has run before."""
    step()
    return _on_cuda(step) if device == "cuda" else _on_cpu(step)


def _on_cuda(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(step: Callable[[], object]) -> int:
    kind = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], profile_memory=True, acc_events=True) as profiler:
        step()  # the profiler sees the release of that alone whose allocation it has seen
        with torch.profiler.record_function(_COUNTED):
            step()
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _COUNTED)
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    now = most = 0
    for when, change in changes:
        if when >= start:
            now += change
            most = max(most, now)
    return most
