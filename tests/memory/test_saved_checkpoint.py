"""Truth: what checkpointing keeps from forward to backward, and what its recompute keeps while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .measuring import F32, Kept, assert_saved, at_peak, layer, measured, memory_of

ROWS, WIDTH = 8, 16
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
SIZE = ROWS * WIDTH * F32  # of every activation here: 512 bytes
WEIGHTS = (WIDTH * WIDTH + WIDTH) * F32


class Checkpointed(nn.Module):
    """A stem, and a block whose three layers keep 2 * SIZE if it is not checkpointed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = checkpoint(self.block, x, **self.settings) if self.settings else self.block(x)
        return out


STEM = Kept("stem", "AddmmBackward0", "mat1", "8x16", "float32", SIZE)
KINDS: dict[str, Callable[[], Checkpointed]] = {
    "non-reentrant": lambda: Checkpointed(use_reentrant=False),
    "non-reentrant, to its end": lambda: Checkpointed(use_reentrant=False, early_stop=False),
    "reentrant": lambda: Checkpointed(use_reentrant=True),
}


def test_without_a_checkpoint() -> None:
    assert_saved(
        measured(Checkpointed(), X),
        STEM,
        Kept("block.0", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),
        Kept("block.1", "SigmoidBackward0", "output", "8x16", "float32", SIZE),  # the input of block.2
    )


def test_a_reentrant_checkpoint_keeps_its_input() -> None:
    input_of_block = Kept("", "CheckpointFunctionBackward", "saved tensor", "8x16", "float32", SIZE)
    assert_saved(measured(KINDS["reentrant"](), X), STEM, input_of_block)
