"""The user's own record_function, anywhere, takes no source line away. No clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import gradscope

X = torch.ones(2, 4)
Range = Callable[[str], AbstractContextManager[object]]


def none(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Net(nn.Module):
    def __init__(self, inside: Range, nested: Range) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside, self.nested = inside, nested

    def forward(self, x: Tensor) -> Tensor:
        with self.inside("inside"):
            x = self.a(x)  # a
            with self.nested("nested"):
                x = x * 2  # product
            out: Tensor = self.b(x)  # b
        return out


@pytest.mark.parametrize("around", [none, record_function], ids=["", "around"])
@pytest.mark.parametrize("inside", [none, record_function], ids=["", "inside"])
@pytest.mark.parametrize("nested", [none, record_function], ids=["", "nested"])
def test_lines_inside_of_ranges(around: Range, inside: Range, nested: Range) -> None:
    model = Net(inside, nested)
    with gradscope.profiling(model, steps=2, warmup=1, memory=False) as prof:
        while True:
            with around("DistributedDataParallel.forward"):
                out = model(X)
            loss = out.sum()  # loss
            loss.backward()
            if prof.step():
                break
    data = prof.report.data
    assert not [note for note in data.notes if "survey step" in note]
    layers = {row.text.rpartition("# ")[2]: row.layer for row in data.lines if "# " in row.text and row.backward_ns}
    assert layers == {"a": "a", "product": "", "b": "b", "loss": None}
    assert {row.path: row.flops for row in data.layers} == {"": 0, "a": 128, "b": 192}
