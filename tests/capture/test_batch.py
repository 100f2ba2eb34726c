"""What a model is said to have been given."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.capture.storages import sizes_text, tensors_in


def test_sizes_in_words() -> None:
    assert sizes_text([]) == ""
    assert sizes_text([torch.ones(4, 256, dtype=torch.int64)]) == "4x256 int64"
    assert sizes_text([torch.ones(()), torch.ones(2, 0).bfloat16()]) == "scalar float32, 2x0 bfloat16"
    many = [torch.ones(i) for i in range(1, 6)]
    assert sizes_text(many) == "1 float32, 2 float32, 3 float32 and 2 more"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape() -> None:
    assert sizes_text([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]) == "nested float32"


@dataclass
class Sample:
    pixels: Tensor
    label: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(x) * scale
        return out


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(3, 8), "3x8 float32"),
        ((torch.ones(3, 8), 2.0, torch.ones(3, dtype=torch.bool)), "3x8 float32, 3 bool"),
        ({"x": torch.ones(5, 8)}, "5x8 float32"),
    ],
    ids=["tensor", "positions", "keywords"],
)
def test_the_batch_of_a_model_file(batch: object, words: str) -> None:
    data = gradscope.profile(Net(), batch, steps=1, warmup=0, memory=False).data
    assert data.workload.batch == words


def test_the_batch_of_a_loop_is_what_the_model_was_called_with() -> None:
    model = Net()
    with gradscope.profiling(model, steps=1, warmup=0, memory=False) as prof:
        for _ in range(20):
            sample = Sample(torch.ones(6, 8), torch.ones(6))
            model(sample.pixels).sum().backward()
            if prof.step():
                break
    assert prof.report is not None
    assert prof.report.data.workload.batch == "6x8 float32"
    assert [tuple(tensor.shape) for tensor in tensors_in(sample)] == [(6, 8), (6,)]


def test_the_batch_is_what_is_trained_on_not_what_was_acted_on_before() -> None:
    """In reinforcement learning a policy is called without gradients too, on one observation."""
    model = Net()
    with gradscope.profiling(model, steps=1, warmup=0, memory=False) as prof:
        for _ in range(20):
            with torch.no_grad():
                model(torch.ones(1, 8))
            model(torch.ones(6, 8)).sum().backward()
            if prof.step():
                break
    assert prof.report is not None
    assert prof.report.data.workload.batch == "6x8 float32"
