"""Measures what this machine can do at most: products, copies, cheapest call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradscope.devices import device_name
from gradscope.tables import Limits

# Each dtype has this long for its products; with the copies and calls a device stays under 12 s.
PRODUCT_NS = 2_000_000_000
COPY_NS = 1_500_000_000
CALL_NS = 500_000_000

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CPU_SIZES = (256, 512, 1024, 2048, 4096)
_CUDA_SIZES = (1024, 2048, 4096, 8192)
_TRIES = 8

# Far larger than the caches between cores and memory.
_CPU_COPY_BYTES = 128 * 1024**2
_CUDA_COPY_BYTES = 512 * 1024**2

_CALLS = 1000
_BATCHES = 20


@dataclass(frozen=True)
class Clock:
    """How long work takes on one device.

    Attributes:
        device: that it runs on.
        now: monotonic, in ns; read after the device has finished.
    """

    device: torch.device
    now: Callable[[], int] = time.perf_counter_ns

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], object]) -> int:
        """ns of one run, at least 1."""
        self.wait()
        start = self.now()
        work()
        self.wait()
        return max(self.now() - start, 1)

    def best(self, work: Callable[[], object], budget_ns: int, tries: int = _TRIES) -> int:
        """ns of the fastest of several runs; no run begins that is likely to end after the budget."""
        end = self.now() + budget_ns
        fastest = self.time(work)  # also warms up
        for _ in range(tries - 1):
            if self.now() + fastest > end:
                break
            fastest = min(fastest, self.time(work))
        return fastest


def measure(device: torch.device, step: Callable[[str], None] = lambda _: None) -> Limits:
    """The ceilings of a device, in under 12 s.

    Args:
        step: told what is measured next.
    """
    clock = Clock(device)
    flops: dict[str, float] = {}
    with torch.no_grad():
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            step(name)
            with _exact_products():
                rate = product_rate(clock, dtype)
            if rate is not None:
                flops[name] = rate
        if device.type == "cuda":
            step("tf32")
            with _exact_products("high"):
                rate = product_rate(clock, torch.float32)
            if rate is not None:
                flops["tf32"] = rate
        step("copy")
        copied = copy_rate(clock)
        step("smallest call")
        called = call_cost(clock)
    return Limits(device=device_name(device), flops=flops, bytes=copied, call_ns=called)


def product_rate(clock: Clock, dtype: torch.dtype, budget_ns: int = PRODUCT_NS) -> float | None:
    """Floating-point operations a second of ``torch.mm`` of square matrices; None where the device cannot.

    Larger and larger ones as far as the time goes: the fastest counts.
    """
    end = clock.now() + budget_ns
    best = 0.0
    expected = 0
    for size in _CUDA_SIZES if clock.device.type == "cuda" else _CPU_SIZES:
        left = end - clock.now()
        if expected and expected > left:
            break
        try:
            fastest = _product_ns(clock, dtype, size, left)
        except (RuntimeError, TypeError):  # the dtype is not supported, or there is no memory left
            break
        best = max(best, 2e9 * size**3 / fastest)
        expected = 8 * fastest
    return best or None


def _product_ns(clock: Clock, dtype: torch.dtype, size: int, budget_ns: int) -> int:
    # Random numbers: a GPU that multiplies ones takes less power, and with that a tenth less time.
    left, right = (_random(size, size, dtype=dtype, device=clock.device) for _ in range(2))
    out = torch.empty_like(left)
    return clock.best(lambda: torch.mm(left, right, out=out), budget_ns)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers from -1 to 1, of a generator of its own: the user's is left as it is."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=torch.float32, device=device).uniform_(-1, 1, generator=generator).to(dtype)


def copy_rate(clock: Clock, budget_ns: int = COPY_NS) -> float:
    """Bytes a second, read and written, of a copy in the device's own memory; on a GPU of a sum, where that is faster.

    A GPU reads faster than it writes. What reads two tensors and writes one, as backward of an activation does, moved
    9 % more on an H200 than a copy: a sum of two tensors does that as well, as in STREAM's triad.

    Source: J. D. McCalpin, "Memory Bandwidth and Machine Balance in Current High Performance Computers" (1995).
    """
    on_cuda = clock.device.type == "cuda"
    size = _CUDA_COPY_BYTES if on_cuda else _CPU_COPY_BYTES
    source = _random(size // 4, dtype=torch.float32, device=clock.device)
    target = torch.ones_like(source)  # written once: its pages are there
    copied = 2e9 * size / clock.best(lambda: target.copy_(source), budget_ns, tries=20)
    if not on_cuda:
        return copied
    other = torch.ones_like(source)
    return max(copied, 3e9 * size / clock.best(lambda: torch.add(source, other, out=target), budget_ns, tries=20))


def call_cost(clock: Clock, budget_ns: int = CALL_NS) -> float:
    """ns of a call that has next to nothing to do."""
    one = torch.ones(1, device=clock.device)

    def calls() -> None:
        for _ in range(_CALLS):
            one.neg()

    return clock.best(calls, budget_ns, tries=_BATCHES) / _CALLS


@contextmanager
def _exact_products(precision: str = "highest") -> Iterator[None]:
    """Products of float32 in float32, or, with "high", in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def devices() -> tuple[torch.device, ...]:
    """The CPU, and each kind of GPU once."""
    found = {"cpu": torch.device("cpu")}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            found.setdefault(device_name(device), device)
    return tuple(found.values())
