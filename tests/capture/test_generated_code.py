"""Code that torch.fx writes in memory: the line is the one that calls it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn

import gradscope


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).exp() * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.traced = fx.symbolic_trace(Scaled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.traced(x)
        return found.sum()


def test_its_lines_are_its_callers() -> None:
    lines = gradscope.profile(Model(), torch.randn(256, 64), steps=2, warmup=1, memory=False).data.lines
    assert lines and {Path(row.file).name for row in lines} == {Path(__file__).name}
    calling = next(row for row in lines if "self.traced(x)" in row.text)
    assert calling.forward_ns > 0 and calling.backward_ns > 0
