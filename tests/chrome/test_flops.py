"""Floating-point operations from recorded shapes, beside torch's own counter of the same step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gradscope.chrome.flops import flops_of
from gradscope.chrome.run import read_trace


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.body = nn.ModuleList(layers), body

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.body(x).sum()


def same(x: Tensor) -> Tensor:
    return x


NETS = {
    "linear": (Net(same, nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)), (4, 6, 16)),
    "convolution": (Net(same, nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, groups=4)), (2, 4, 17, 20)),
    "strides": (Net(same, nn.Conv1d(3, 6, 5, dilation=2, padding="same")), (2, 3, 40)),
    "transposed": (Net(same, nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1)), (2, 4, 9, 7)),
    "attention": (Net(lambda x: F.scaled_dot_product_attention(x, x, x), nn.Linear(8, 8)), (2, 3, 16, 8)),
    "batched": (Net(lambda x: x @ x.transpose(-2, -1), nn.Linear(8, 8)), (5, 6, 8)),
}


@pytest.mark.parametrize("name", NETS)
def test_as_torch_counts(name: str, tmp_path: Path) -> None:
    model, shape = NETS[name]
    x = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as prof:
        model(x).backward()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    rows = read_trace(path).data.layers
    assert sum(row.flops or 0 for row in rows) == counter.get_total_flops() > 0
    assert all((row.flops or 0) == (row.forward_flops or 0) + (row.backward_flops or 0) for row in rows)


def test_without_shapes_there_are_none(tmp_path: Path) -> None:
    model, shape = NETS["linear"]
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as prof:
        model(torch.randn(shape)).backward()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    assert all(row.flops is None for row in read_trace(path).data.layers)


@pytest.mark.parametrize(
    ("name", "shapes", "given"),
    [
        ("aten::relu", [[2, 2]], []),
        ("aten::mm", [[2, 2]], []),
        ("aten::mm", [[2, 3], [4, 5]], []),
        ("aten::mm", "[[2, 2]]", []),
        ("aten::mm", [["a", "b"], ["c", "d"]], []),
        ("aten::convolution", [[1, 2, 3, 3], [2, 2, 3, 3], [2]], ["", ""]),
        ("aten::convolution_backward", [[], [], []], ["x"] * 11),
        ("aten::_scaled_dot_product_flash_attention", [[1, 2, 3]] * 3, []),
    ],
)
def test_what_is_no_such_operation_counts_nothing(name: str, shapes: object, given: object) -> None:
    assert flops_of(name, shapes, given) == 0
