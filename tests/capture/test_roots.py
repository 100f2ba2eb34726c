"""Modules that are called beside the model are no layers, and what they are given is not the batch. No clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradscope
from gradscope.capture.phases import SETTLING_STEPS
from gradscope.tables import RunData

X = torch.ones(2, 4)


class Scaled(nn.Module):
    """A transform, or a metric: no parameters, one multiplication by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.scale
        return out


class Images(Dataset[Tensor]):
    def __init__(self) -> None:
        self.transform = nn.Sequential(Scaled())

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        out: Tensor = self.transform(torch.full((4, 1), float(index)))[:, 0]
        return out


def measured(step: Callable[[], Any]) -> RunData:
    with gradscope.profiling(steps=2, warmup=1, memory=False) as prof:
        while True:
            step()
            if prof.step():
                break
    return prof.report.data


def muls(data: RunData) -> dict[tuple[str | None, str], float]:
    return {(op.layer, op.phase): op.calls for op in data.ops if op.name in {"(Scaled)", "(Sequential)"}}


@pytest.mark.parametrize("where", ["dataset", "loop", "metric"])
def test_transforms_and_metrics_are_no_layers(where: str) -> None:
    model, beside = nn.Sequential(nn.Linear(4, 4)), Scaled()
    batches = iter(DataLoader(Images(), batch_size=3))

    def step() -> None:
        batch = next(batches) if where == "dataset" else torch.ones(3, 4)
        if where == "loop":
            batch = beside(batch[:, :, None])[:, :, 0]
        out = model(batch)
        out.sum().backward()
        if where == "metric":
            beside(out.detach())

    data = measured(step)
    assert [row.path for row in data.layers] == ["", "0"]
    assert data.workload.batch == "3x4 float32"
    found = muls(data)
    assert set(found) == {(None, "other")}
    assert not [op for op in data.ops if op.layer is None and op.phase == "forward" and op.name == "aten::mul"]


def test_a_loss_module_without_parameters_is_a_layer_for_backward_reaches_it() -> None:
    model, loss = nn.Sequential(nn.Linear(4, 4)), nn.MSELoss()
    data = measured(lambda: loss(model(X), X).backward())
    assert [row.path for row in data.layers] == ["", "0", "MSELoss"]


def test_a_frozen_teacher_is_a_layer_for_its_forward_is_part_of_the_step() -> None:
    model, teacher = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

    def step() -> None:
        with torch.no_grad():
            target = teacher(X)
        (model(X) - target).sum().backward()

    assert {row.path for row in measured(step).layers} == {"Sequential", "Sequential.0", "Linear"}


def test_a_part_of_the_model_that_no_gradient_reaches_is_a_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.body = Scaled(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(self.scaled(x))
            return out

    model = Net()
    layers = {row.path: row.calls for row in measured(lambda: model(X).sum().backward()).layers}
    assert layers["scaled"] == 1 and layers["scaled.inner"] == 1


@pytest.mark.parametrize("anew", [True, False])
def test_a_holder_that_is_made_anew_names_nothing(anew: bool) -> None:
    """The garbage collector may have taken the others when it is looked for; then they stay until it runs again."""
    net, held, steps = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), list[nn.Module](), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if anew and steps <= 1 + 2 + SETTLING_STEPS:
            held.clear()
        if anew or not held:
            held.append(nn.ModuleDict({"inner": net}))
        net(X).sum().backward()

    paths = {row.path for row in measured(step).layers}
    assert paths == ({"", "0", "1"} if anew else {"", "inner", "inner.0", "inner.1"})
