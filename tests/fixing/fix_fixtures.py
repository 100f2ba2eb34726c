"""A small model file to fix, and gains that no clock decides."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradscope.fixing.options import FixOptions
from gradscope.fixing.report import FixReport
from gradscope.fixing.run import fix_workload
from gradscope.patching.prove import predict
from gradscope.tables import Options
from gradscope.workload import load_target
from tests.made_times import BETTER, Saves, made_times

MODEL = '''"""A model."""

import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.tril(torch.ones(64, 64)).bool())

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # all of them
        att = att.masked_fill(~self.seen[:length, :length], float("-inf"))
        att = self.drop(att.softmax(-1))
        y = att @ v
        return y.transpose(1, 2).reshape(batch, length, width)


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def workload():
    torch.manual_seed(0)
    return Net(), torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))


def plain():
    return nn.Linear(2, 1), torch.ones(3, 2)


def broken():
    raise ValueError("out of data")
'''

SCRIPT = (
    MODEL.partition("def workload")[0]
    + """torch.manual_seed(3)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.randn(2, 12, 32)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.4f}")
"""
)

FAST = ("--steps", "1", "--warmup", "0", "--no-lines", "--no-memory", "-q")


@pytest.fixture(name="gains")
def gains_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Saves], None]:
    """No clock: every measurement in turns gives what the test sets, first of all :data:`BETTER`."""
    monkeypatch.setattr(predict, "measured", lambda *args: predict.Saving(BETTER.ns, BETTER.bytes))
    return made_times(monkeypatch)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder of its own with model.py and train.py in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("model.py").write_text(MODEL)
    Path("train.py").write_text(SCRIPT)
    yield tmp_path
    for name in ("model", "written"):
        sys.modules.pop(name, None)
    linecache.clearcache()


@pytest.fixture(name="fixed")
def fixed_fixture(folder: Path, gains: Callable[[Saves], None]) -> FixReport:
    """The attention of model.py replaced, whose dropout the new code only reads."""
    gains(BETTER)
    options = Options(steps=2, warmup=1, device="cpu")
    return fix_workload(load_target("model.py:workload"), FixOptions(options, recipes=("attention",)))
