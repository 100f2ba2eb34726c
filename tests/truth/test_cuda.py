"""Truth on a GPU: device time by layer, from kernels that spin a set number of clock cycles."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope

from .burning import profiler_runs
from .proof import STEPS, WARMUP, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEGACYCLES = 1_000_000  # about half a millisecond


@dataclass
class DeviceMeter:
    """Pairs of CUDA events around every spin, by owner and whether it was forward."""

    spins: dict[tuple[str, bool], list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def spin(self, owner: str, forward: bool, cycles: int) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        if profiler_runs():
            self.spins[owner, forward].append((start, end))

    def ns(self, owner: str) -> float:
        """Mean device time a step of one owner, forward and backward, over the measured steps."""
        torch.cuda.synchronize()
        total = 0.0
        for forward in (True, False):
            pairs = self.spins[owner, forward][1 : 1 + STEPS]  # one settling step before, the survey after
            total += sum(start.elapsed_time(end) for start, end in pairs) * 1e6 / STEPS
        return total


class Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: DeviceMeter, owner: str, cycles: tuple[int, int]) -> Tensor:
        ctx.meter, ctx.owner, ctx.cycles = meter, owner, cycles
        meter.spin(owner, True, cycles[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.meter.spin(ctx.owner, False, ctx.cycles[1])
        return grad, None, None, None


class Spinning(nn.Module):
    def __init__(self, meter: DeviceMeter, owner: str, forward: int, backward: int) -> None:
        super().__init__()
        self.meter, self.owner, self.cycles = meter, owner, (forward * MEGACYCLES, backward * MEGACYCLES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Spin.apply(x, self.meter, self.owner, self.cycles)
        return out


@pytest.fixture
def measured() -> tuple[Any, DeviceMeter]:
    meter = DeviceMeter()
    model = nn.Sequential(
        nn.Linear(64, 64), Spinning(meter, "1", 2, 6), nn.Linear(64, 64), Spinning(meter, "3", 4, 2)
    ).cuda()
    batch = torch.ones(8, 64, device="cuda")
    report = gradscope.profile(
        model, batch, lambda output, _: output.sum(), steps=STEPS, warmup=WARMUP, device="cuda", lines=False
    )
    return report, meter


def test_device_time_by_layer(measured: tuple[Any, DeviceMeter]) -> None:
    report, meter = measured
    layers = rows(report)
    for owner in ("1", "3"):
        truth = meter.ns(owner)
        assert truth > 1e6
        assert layers[owner].device_ns == pytest.approx(truth, rel=0.03, abs=0.3e6), owner
    for owner in ("0", "2"):
        assert layers[owner].device_ns < 0.3e6


def test_kernels_are_listed_below_their_layer(measured: tuple[Any, DeviceMeter]) -> None:
    report, _ = measured
    spinning = [kernel for kernel in report.data.kernels if kernel.layer == "1" and "spin" in kernel.name.lower()]
    assert {kernel.phase for kernel in spinning} == {"forward", "backward"}
    device: dict[str | None, int] = defaultdict(int)
    for kernel in report.data.kernels:
        device[kernel.layer] += kernel.device_ns
    for path, row in rows(report).items():
        assert device[path] == row.device_ns, path


def test_launch_time_is_not_device_time(measured: tuple[Any, DeviceMeter]) -> None:
    """The CPU launches a spin in microseconds; where the two are mixed up, milliseconds appear in both."""
    report, meter = measured
    for owner in ("1", "3"):
        assert 0 < rows(report)[owner].launch_ns < 0.5 * meter.ns(owner)


def test_asking_for_cuda_runs_on_cuda(measured: tuple[Any, DeviceMeter]) -> None:
    report, _ = measured
    assert report.data.environment["device"] == "cuda"
    assert report.data.environment["device_name"] == torch.cuda.get_device_name()


def test_profiling_leaves_random_state_and_memory_of_the_device() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    batch = torch.ones(8, 64, device="cuda")
    gradscope.profile(model, batch, steps=STEPS, warmup=WARMUP, device="cuda")
    torch.cuda.synchronize()
    state, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    gradscope.profile(model, batch, steps=STEPS, warmup=WARMUP, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.cuda.memory_allocated() <= held
    assert all(parameter.grad is None for parameter in model.parameters())
