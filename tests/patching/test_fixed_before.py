"""A program that has recipes already: their own code is no place to put one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradscope.kernels import pays
from gradscope.patching.plan import plan
from tests.patching.test_bindings import net

_RULE = pays.FEWEST  # other tests of patching put an empty one there
TEXT = """\
import torch
from torch import nn

from gradscope.recipes import attention, gelu, rms_norm, rope, swiglu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.up = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("angle", torch.rand(6, 4).repeat(1, 2))

    def forward(self, x):
        q, k, v = self.qkv(rms_norm(x, x.shape[-1:], eps=1e-5)).unsqueeze(1).chunk(3, -1)
        q, k = rope(q, self.angle.cos(), self.angle.sin()), rope(k, self.angle.cos(), self.angle.sin())
        x = x + attention(q, k, v, is_causal=True).squeeze(1)
        return gelu(swiglu(self.gate(x), self.up(x)))
"""


def test_what_recipes_do_themselves_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is as fast a recipe runs torch's operations, which read as the pattern that it stands for."""
    monkeypatch.setattr(pays, "FEWEST", _RULE)
    assert not plan(net(tmp_path, TEXT), torch.randn(2, 6, 8, dtype=torch.float64)).sites
