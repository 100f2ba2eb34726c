"""Torch's own fast paths of evaluation are taken while a program is measured, as alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradscope

WIDTH, LENGTH = 8, 6
X = torch.randn(4, LENGTH, WIDTH)
PADDED = torch.arange(LENGTH)[None] >= torch.tensor([[2], [4], [5], [6]])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=PADDED)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def evaluated(kind: Callable[[], nn.Module], *, measured: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = kind()
    found = []
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(24):
            model(X).square().sum().backward()
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                found.append(model(X))
            model.train()
            if measured:
                prof.step()
    if measured:
        assert not [note for note in prof.report.data.notes if "failed" in note]
        assert prof.report.data.lines
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", [Encoder, Attention])
def test_an_evaluation_computes_what_it_does_alone(kind: Callable[[], nn.Module]) -> None:
    alone, found = (evaluated(kind, measured=each) for each in (False, True))
    assert all(torch.equal(*each) for each in zip(alone, found, strict=True))
