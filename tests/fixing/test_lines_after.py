"""Source lines of a patched model: the user's own, never those of the recipe that runs in their place."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradscope
from gradscope.recipes import packed_attention


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(64, 192), 4

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.heads, -1).transpose(1, 2)
        weights = F.softmax((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1)), dim=-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)


class Called(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return packed_attention(self.qkv(x), self.heads)


X = torch.randn(4, 128, 64)


def files(model: nn.Module) -> set[str]:
    data = gradscope.profile(model, X, steps=2, warmup=1, device="cpu").data
    assert sum(row.backward_ns for row in data.lines) > 0
    return {Path(row.file.strip("<>")).name for row in data.lines}


def test_a_recipe_that_is_called_counts_for_the_line_that_calls_it() -> None:
    assert files(Called()) == {Path(__file__).name}


def test_so_does_one_that_was_patched_in() -> None:
    model = Attention()
    patches = gradscope.patch(model, X, recipes=["packed_attention"])
    try:
        assert [site.recipe for site in patches.sites] == ["packed_attention"] and patches.swaps
        found = files(model)
    finally:
        patches.revert()
    assert found == {Path(__file__).name}
