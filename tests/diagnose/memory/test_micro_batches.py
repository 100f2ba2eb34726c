"""What a rule says is freed is alive at the peak: with gradient accumulation less than what is kept in a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.memory.measuring import in_a_loop, memory_of

ROWS, WIDTH, PASSES = 1024, 512, 4
MASK = ROWS * WIDTH * 4


class Dropped(nn.Module):
    """A mask that fills most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(8, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(self.inner(x).relu()))
        return out


@pytest.mark.parametrize("passes", [1, PASSES])
def test_no_more_is_freed_than_is_alive_at_the_peak(passes: int) -> None:
    model, x = Dropped(), torch.randn(ROWS, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            model(x).square().mean().backward()
        optimizer.step()

    data = in_a_loop(model, step)
    (one,) = [finding for finding in data.findings if finding.rule == "saved-dropout"]
    rows = [row for row in memory_of(data).saved if row.layer == "drop" and row.node == "MulBackward0"]
    masks = sum(row.at_peak_bytes or 0 for row in rows)
    assert sum(row.bytes for row in rows) == passes * MASK
    assert one.predicted_saving_bytes == masks == MASK
    said = f"of what is saved for backward, summed over {passes} backward passes"
    assert (said in (one.evidence or "")) == (passes > 1)
