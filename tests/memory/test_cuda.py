"""Truth on a GPU: the peak against the caching allocator's own, and what a process takes beyond it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.tables import RunData

from .measuring import F32, Kept, assert_saved, check_sums, layer, memory_of, saved, summed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = 512  # the caching allocator rounds every request up to a multiple of this
ROWS, IN, HIDDEN, OUT = 256, 128, 512, 64


def rounded(size: int) -> int:
    """Bytes that the caching allocator takes for ``size``."""
    return -(-size // BLOCK) * BLOCK


class Network(nn.Module):
    """Linear, GELU, a checkpoint, an in-place ReLU, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(IN, HIDDEN), nn.GELU()
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Sigmoid())
        self.relu, self.tail = nn.ReLU(inplace=True), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.act(self.stem(x)), use_reentrant=False)
        out: Tensor = self.tail(self.relu(x * 2))
        return out


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(IN, 4, HIDDEN, dropout=0.1, batch_first=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer] | None] = {
    "no optimizer": None,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),  # foreach: all weights at once
}


def in_a_loop(
    model: nn.Module, x: Tensor, make: Callable[[nn.Module], torch.optim.Optimizer] | None
) -> tuple[RunData, int]:
    """A loop's report, and the allocator's own peak of the same step without gradscope."""
    optimizer = make(model) if make is not None else None

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        while not (step() or prof.step()):
            pass
    data = prof.report.data
    check_sums(data)
    del prof
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return data, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [Network, attention], ids=["network", "attention"])
def test_the_peak_is_the_allocators(make: Callable[[], nn.Module], optimizer: str) -> None:
    """Exactly: both count the allocator's blocks. cuBLAS's workspace was allocated in an earlier step."""
    torch.manual_seed(0)
    model, x = make().cuda(), torch.randn(4, ROWS // 4, IN, device="cuda")
    data, truth = in_a_loop(model, x, OPTIMIZERS[optimizer])
    memory = memory_of(data)
    assert memory.device == f"cuda:{torch.cuda.current_device()}"
    assert memory.peak_bytes == truth
    assert memory.allocated_bytes == memory.peak_bytes


def test_what_is_saved_is_counted_in_bytes_of_tensors() -> None:
    """A batch of 3 x 5 is 60 bytes where it is saved, and the allocator's 512 where it is at the peak."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Sigmoid()).cuda()
    data = gradscope.profile(model, torch.ones(3, 5, device="cuda"), summed, steps=1, warmup=1, device="cuda").data
    check_sums(data)
    assert_saved(
        data,
        Kept("0", "AddmmBackward0", "mat1", "3x5", "float32", 3 * 5 * F32),
        Kept("1", "SigmoidBackward0", "output", "3x7", "float32", 3 * 7 * F32),
    )
    peak = {(row.owner, row.category): row.bytes for row in memory_of(data).at_peak}
    assert peak[None, "inputs"] == BLOCK
    assert peak["0", "parameters"] == rounded(5 * 7 * F32) + rounded(7 * F32)
    assert all(size % BLOCK == 0 for size in peak.values())


def test_dropout_keeps_one_byte_an_element() -> None:
    """The fused kernel of CUDA keeps a mask of bools, where the CPU keeps floats."""
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Dropout(0.5)).cuda()
    data = gradscope.profile(model, torch.ones(ROWS, IN, device="cuda"), summed, steps=1, warmup=1, device="cuda").data
    (mask,) = (row for row in saved(data) if row.layer == "1")
    assert (mask.node, mask.dtype, mask.bytes) == ("NativeDropoutBackward0", "bool", ROWS * HIDDEN)


def test_allocations_of_layers() -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, OUT), nn.ReLU()).cuda()
    data = gradscope.profile(model, torch.ones(ROWS, IN, device="cuda"), summed, steps=1, warmup=1, device="cuda").data
    wide = ROWS * HIDDEN * F32
    assert (layer(data, "0").forward_allocations, layer(data, "0").forward_allocated_bytes) == (1, wide)
    assert (layer(data, "1").forward_allocations, layer(data, "1").backward_allocated_bytes) == (0, wide)


def test_reserved_and_outside_memory() -> None:
    """The allocator holds at least what it gave; the context and libraries take some hundred MB beside it."""
    model, x = Network().cuda(), torch.randn(ROWS, IN, device="cuda")
    data, _ = in_a_loop(model, x, None)
    memory = memory_of(data)
    assert memory.reserved_bytes is not None and memory.outside_allocator_bytes is not None
    assert memory.peak_bytes <= memory.reserved_bytes <= torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    assert memory.device_total_bytes == total
    # Other processes may come and go: what is beyond the allocator now is at most a few MB from what it was.
    now = total - free - torch.cuda.memory_reserved()
    assert memory.outside_allocator_bytes == pytest.approx(now, abs=64 * 2**20)
    assert 50 * 2**20 < memory.outside_allocator_bytes < total


def test_a_leak_is_seen() -> None:
    model, x, kept = nn.Linear(IN, OUT).cuda(), torch.randn(ROWS, IN, device="cuda"), []

    def step() -> None:
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        kept.append(out.detach())

    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        while not (step() or prof.step()):
            pass
    (row,) = (row for row in memory_of(prof.report.data).retained if row.grows)
    assert (row.layer, row.op, row.count, row.bytes) == ("", "aten::linear", 1, ROWS * OUT * F32)


def test_nothing_outlives_a_run() -> None:
    model, x = Network().cuda(), torch.randn(ROWS, IN, device="cuda")
    for _ in range(2):  # what is allocated once, workspaces say, is allocated by the first
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        gradscope.profile(model, x, summed, steps=1, warmup=1, device="cuda")
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
