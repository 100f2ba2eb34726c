"""Products of matrices that torch has no formula for: their FLOPs are not told, compiled as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.tables import RunData

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(8, 17, 8, dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


def measured(*, compiled: bool) -> RunData:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8)).bfloat16()
    run: Any = torch.compile(model) if compiled else model
    with gradscope.profiling(model, steps=2, warmup=3) as prof:
        for _ in range(60):
            if prof.step():
                break
            run(torch.randn(16, 8).bfloat16()).square().sum().backward()
            model.zero_grad()
    return prof.report.data


def test_products_of_groups_are_not_counted_as_nothing(inductor: None) -> None:
    found = [measured(compiled=each) for each in (False, True)]
    for run in found:
        assert {row.path: row.flops for row in run.layers} == {"": 0, "0": 4096, "1": None, "2": 6144}, run.notes
        assert sum("no formula" in note for note in run.notes) == 1, run.notes
