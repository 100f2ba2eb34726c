"""Rows that are as many as something else when they are recorded: keys beside queries, targets of a single one."""

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


class Picked(nn.Module):
    """The targets of a single row get a dimension before them, which of more rows picks all from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        log_p = logits.log_softmax(-1)
        nll = -log_p.gather(-1, y.unsqueeze(0))
        return nll.sum()


def test_targets_of_a_single_row_are_not_those_of_each_row(own_code_at_every_size: None) -> None:
    model = Picked().double()
    original = copy.deepcopy(model)
    batch = {"x": torch.randn(1, WIDTH).double(), "y": torch.tensor([3])}
    patches = Patches(gradscope.plan(model, batch, recipes=["cross_entropy"]))
    patches.apply()
    x, y = torch.randn(4, WIDTH).double(), torch.tensor([3, 1, 10, 0])
    torch.testing.assert_close(model(x, y), original(x, y))
    patches.revert()
