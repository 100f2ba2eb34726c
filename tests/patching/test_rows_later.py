"""Keys that have as many rows as the queries when they are recorded, for a table of so many is laid over them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches

WIDTH, TOKENS = 8, 6


class Attends(nn.Module):
    """Its mask is of the queries' length alone: one row of it is laid over all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.places = nn.Parameter(torch.rand(TOKENS, WIDTH) + 0.5)


class Multiplied(Attends):
    """The keys are multiplied with a table of several rows."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.q(x), self.k(x), self.v(x)
        keys, values = k * self.places, torch.mul(v, self.places)
        scores = (q @ keys.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return scores.softmax(-1) @ values


def test_one_query_sees_all_keys() -> None:
    model = Multiplied().double()
    original = copy.deepcopy(model)
    patches = Patches(gradscope.plan(model, torch.randn(2, TOKENS, WIDTH).double(), recipes=["attention"]))
    patches.apply()
    assert "is_causal=True" in patches.diff, patches.table.reasons.tolist()
    x, past = torch.randn(2, 1, WIDTH).double(), torch.randn(2, TOKENS, WIDTH).double()
    torch.testing.assert_close(model(x, past), original(x, past))
    patches.revert()
