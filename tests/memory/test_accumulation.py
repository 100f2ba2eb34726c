"""Truth: what is summed over several backward passes of a step, and what of it is alive at the peak."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradscope.tables import MemoryInfo

from .measuring import F32, in_a_loop, memory_of

ROWS, WIDTH, PASSES = 64, 32, 4
ONE = ROWS * WIDTH * F32  # an activation


class Block(nn.Module):
    """Two sigmoids, each of which saves its output; the products read the batch and the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).sigmoid()).sigmoid()
        return out


def accumulating(passes: int) -> MemoryInfo:
    model, x = Block(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            model(x).sum().backward()
        optimizer.step()

    return memory_of(in_a_loop(model, step))


def test_saved_in_each_pass_and_at_the_peak() -> None:
    memory = accumulating(PASSES)
    rows = [row for row in memory.saved if row.node == "SigmoidBackward0"]
    assert memory.backward_passes == PASSES
    assert sum(row.bytes for row in rows) == 2 * PASSES * ONE
    assert sum(row.at_peak_bytes or 0 for row in rows) == memory.saved_at_peak_bytes <= 2 * ONE
    assert memory.saved_at_peak_bytes == sum(row.bytes for row in memory.at_peak if row.category == "saved activations")


def test_one_pass() -> None:
    memory = accumulating(1)
    assert memory.backward_passes == 1
    assert memory.saved_at_peak_bytes and memory.saved_at_peak_bytes <= memory.saved_bytes
