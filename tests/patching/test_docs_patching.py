"""The worked example of docs/patching.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradscope
from gradscope.patching.match.matchers import MATCHERS

PAGE = Path(__file__).parents[2] / "docs" / "patching.md"


class Dropped(nn.Module):
    """Dropout by module, by function, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x))
        x = functional.dropout(x, 0.5, self.training)
        return functional.dropout(x * 2, p=0.5, training=self.training, inplace=True)


def test_the_example_finds_and_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "RECIPE" in block
    ]
    assert example.count("\n") < 80
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    monkeypatch.setitem(MATCHERS, names["RECIPE"], names["matches"])
    model, x = Dropped(), torch.randn(4, 8)
    patches = gradscope.patch(model, x, recipes=["dropout"], verify=False)
    assert [(site.supported, site.reasons) for site in patches.sites] == [
        (True, []),
        (True, []),
        (False, ["it works in place"]),
    ]
    added = [line[1:].strip() for line in patches.diff.splitlines() if line.startswith("+ ")]
    assert added == [
        "x = dropout(self.linear(x), p=self.drop.p, training=self.drop.training)",
        "x = dropout(x, p=0.5, training=self.training)",
    ]
    model.eval()
    out = model(x)
    patches.revert()
    assert torch.equal(out, model(x))
