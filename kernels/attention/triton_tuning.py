"""Which of a few block sizes is the fastest for calls of one kind: timed once in a process.

Block sizes change the order of sums, and so the last bits. A choice is kept for the process, the first candidate stays
unless another is clearly faster, and under ``torch.use_deterministic_algorithms`` nothing is timed: the first it is.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradscope.kernels.support import interpreting

MOST = 3  # candidates of a kind: each is compiled, which takes seconds
LEAST_OPERATIONS = 1 << 34  # of a call worth timing: about 0.1 ms of an H100
CLEARLY = 0.95  # of the first candidate's time, which another must stay below
_ROUNDS = 5

C = TypeVar("C")
_chosen: dict[Hashable, object] = {}
_timing = threading.Lock()


def times(tensor: Tensor, operations: int) -> bool:
    """Check that a call on the tensor's device may be timed, and is worth it.

    Not while a CUDA graph is recorded, for timing waits for the device.
    """
    return (
        tensor.is_cuda
        and operations >= LEAST_OPERATIONS
        and not interpreting()
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def fastest(
    key: Hashable, candidates: Sequence[C], run: Callable[[C], object], clock: Callable[[Callable[[], object]], float]
) -> C:
    """The candidate kept for ``key``; found by timing each, where there is none yet.

    Args:
        key: what the choice depends on.
        candidates: the first is taken where none is clearly faster, and the only one that may not fail.
        run: launches with one; as often as wanted, with the same results in memory of its own.
        clock: runs what it is given some times; the time of one.
    """
    if len(candidates) == 1:
        return candidates[0]
    with _timing:
        if key not in _chosen:
            _chosen[key] = _found(candidates, run, clock)
        return _chosen[key]  # type: ignore[return-value]


def _found(candidates: Sequence[C], run: Callable[[C], object], clock: Callable[[Callable[[], object]], float]) -> C:
    first, *others = candidates[:MOST]
    taken, least = first, clock(lambda: run(first)) * CLEARLY
    for candidate in others:
        try:
            time = clock(lambda candidate=candidate: run(candidate))  # type: ignore[misc]
        except _too_large():
            continue
        if time < least:
            taken, least = candidate, time
    return taken


def _too_large() -> tuple[type[Exception], ...]:
    """Errors of a launch whose tiles do not fit, or for which no memory is left."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources, torch.OutOfMemoryError


def device_ms(work: Callable[[], object]) -> float:
    """Median time on the current device, once compiled."""
    work()
    took = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took)
