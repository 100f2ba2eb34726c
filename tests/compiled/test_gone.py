"""A compiled model of a function that returns before the run has ended."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradscope

# Loading Dynamo warns of its own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def test_a_compiled_model_that_is_gone_before_its_memory_is_measured() -> None:
    """A part of what torch.compile put around it, and that a part of it, as far as is known then."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        run = torch.compile(model, backend="eager")
        for _ in range(8):
            run(torch.randn(4, 8)).square().mean().backward()
            prof.step()

    with gradscope.profiling(steps=2, warmup=1) as prof:
        train()
    assert {row.path for row in prof.report.data.layers} >= {"0", "1", "2"}
