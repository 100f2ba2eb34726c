"""Memory is measured in one step: where that had another batch than the report names, it says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.phases.memory import MemorySteps


@pytest.mark.parametrize("last", [16, 48])
def test_memory_of_another_batch_is_said(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of an epoch; the step that settles has yet another, which nobody asks for."""
    sizes, begin = [48], MemorySteps.begin

    def begins(self: MemorySteps) -> None:
        sizes[:] = [last, 5]
        begin(self)

    monkeypatch.setattr(MemorySteps, "begin", begins)
    model = nn.Linear(8, 8)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(100):
            model(torch.randn(sizes.pop() if len(sizes) > 1 else sizes[0], 8)).sum().backward()
            if prof.step():
                break
    notes = [note for note in prof.report.data.notes if note.startswith("memory was measured in a step")]
    said = "memory was measured in a step whose batch was 16x8 float32, not 48x8 float32"
    assert notes == ([said] if last == 16 else [])
