"""Device time, memory and the machine's two ceilings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from recipe_gpu.problem import Step

FLUSH_BYTES = 1 << 28  # five times a Hopper's second-level cache
COPY_BYTES = 4 << 30
PRODUCT = 8192
SHORTEST_SLEEP_MS, LONGEST_SLEEP_MS = 0.2, 8.0
CYCLES_TO_CALIBRATE = 20_000_000  # about 10 ms


@dataclass(frozen=True, slots=True)
class Limits:
    """What this device does at most, measured in this run."""

    bytes_per_s: float  # of a large copy, read and written
    flop_per_s: float  # of a large bfloat16 product of random numbers


@dataclass(frozen=True, slots=True)
class Sample:
    """One step."""

    device_ms: float
    host_ms: float  # until everything was queued


class CudaTimer:
    """Times steps on the current device with events, from a cold cache."""

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_TO_CALIBRATE)  # the clock rises
        self._cycles_per_ms = CYCLES_TO_CALIBRATE / self._between(lambda: torch.cuda._sleep(CYCLES_TO_CALIBRATE))

    def sample(self, step: Step, host_ms: float = 0.0) -> Sample:
        """One step; ``host_ms`` is what queueing it took before.

        The device sleeps meanwhile: what is timed has no gaps but those of the kernels themselves, as in a model whose
        launches run ahead of the device.
        """
        # Read, not written: lines to be written back would cost the step their time.
        self._flush.sum()
        torch.cuda._sleep(round(min(max(2 * host_ms, SHORTEST_SLEEP_MS), LONGEST_SLEEP_MS) * self._cycles_per_ms))
        begun = time.perf_counter()
        self._start.record()
        step()
        self._end.record()
        queued = (time.perf_counter() - begun) * 1e3
        self._end.synchronize()
        return Sample(self._start.elapsed_time(self._end), queued)

    def peak(self, step: Step) -> int:
        """Most bytes at one moment of a step beyond those that were allocated before it."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def waits(self, step: Step) -> bool:
        """Check that the host waits for the device within the step."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return False

    def synchronize(self) -> None:
        """Wait for the device; raises what went wrong on it."""
        torch.cuda.synchronize()

    def limits(self) -> Limits:
        """The ceilings: medians of ten, after three to warm up."""
        source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
        copy_ms = self._median(partial(torch.empty_like(source).copy_, source))
        a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product_ms = self._median(partial(torch.mm, a, b))
        del source, a, b
        torch.cuda.empty_cache()
        return Limits(2 * COPY_BYTES / copy_ms * 1e3, 2 * PRODUCT**3 / product_ms * 1e3)

    def _median(self, work: Callable[[], object]) -> float:
        return statistics.median([self._between(work) for _ in range(13)][3:])

    def _between(self, work: Callable[[], object]) -> float:
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


def error_of(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest ‖found - expected‖ / ‖expected‖ of any pair; infinite where a number is none, or a shape is another."""
    worst = 0.0
    for ours, right in zip(found, expected, strict=True):
        if ours.shape != right.shape:
            return float("inf")
        size = right.float().norm().item()
        off = (ours.float() - right.float()).norm().item()
        error = off / size if size else off
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst
