"""What a finding promises in memory, compared with what the patch gives: the profiles before and after."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradscope
from gradscope.patching import places as found_places
from gradscope.patching.prove import predict


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, 4, -1).transpose(1, 2)
        k = k.view(batch, length, 4, -1).transpose(1, 2)
        v = v.view(batch, length, 4, -1).transpose(1, 2)
        weights = self.drop(F.softmax((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1)), dim=-1))
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Stack(nn.Module):
    """Layers of attention, and behind them the peak, where none of them runs."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(64, dropout) for _ in range(layers))
        self.head = nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.micro_runs
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers", [1, 4])
def test_attention_promises_what_its_patch_gives(layers: int, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured; the time is what the replay of both ways tells on a machine where nothing else runs."""
    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)  # however long the step took
    monkeypatch.setattr(predict.Replay, "times_ns", lambda *_: (3_000_000, 1_000_000))
    torch.manual_seed(0)
    model, batch = Stack(layers, dropout), torch.randn(4, 256, 64)
    before = gradscope.profile(model, batch, steps=2, warmup=1, device="cpu").data
    promised = sum(
        finding.predicted_saving_bytes or 0 for finding in before.findings if finding.rule == "attention-by-hand"
    )
    patches = gradscope.patch(model, batch, recipes=["packed_attention"], verify=False)
    try:
        assert len(patches.swaps) == layers
        after = gradscope.profile(model, batch, steps=2, warmup=1, device="cpu").data
        assert not patches.old_calls
    finally:
        patches.revert()
    assert before.memory is not None and after.memory is not None
    # The layers are not running at the peak: what they free there is what they save less for backward. Without dropout
    # the recipe's own code for a CPU saves the scores as well.
    given = before.memory.saved_bytes - after.memory.saved_bytes
    assert before.memory.peak_layer == "head" and (given > 4_000_000) == (dropout > 0)
    assert promised == pytest.approx(given, rel=0.02, abs=1_000)  # a seed, and sums of rows
