"""What a DataLoader computes is no part of forward, also between the batches of one step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradscope


class _Sorted(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(16.0).erfinv()


def test_batches_of_an_accumulating_step_are_between_the_phases() -> None:
    model = nn.Linear(16, 4)
    batches = iter(DataLoader(_Sorted(), batch_size=2))
    with gradscope.profiling(model, steps=2, warmup=1, memory=False) as run:
        while True:
            for _ in range(2):
                loss = model(next(batches).nan_to_num()).mean().sinh()
                loss.backward()
            if run.step():
                break
    ops = run.report.ops
    assert dict(ops[ops["name"] == "aten::erfinv"].groupby("phase")["calls"].sum()) == {"other": 4}
    assert dict(ops[ops["name"] == "aten::sinh"].groupby("phase")["calls"].sum()) == {"forward": 2}
