"""What goes into the user's files: only what every module that runs the text may have."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradscope
from gradscope.patching.patches import Patches

MODEL = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, keep=False, bias=False):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.keep, self.bias, self.kept = keep, bias, []

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        att = (q @ k.transpose(-2, -1)) * 0.25
        if self.bias:
            att = att.sigmoid()
        else:
            att = att.softmax(-1)
        if self.keep:
            self.kept.append(att.detach())
        return (att @ v).squeeze(1)


class Net(nn.Module):
    def __init__(self, **second):
        super().__init__()
        self.one, self.two = Attention(), Attention(**second)

    def forward(self, x):
        return self.two(self.one(x))"""


@pytest.fixture(name="module")
def module_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The model, from a file that ends without a line end."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    spec = importlib.util.spec_from_file_location("net", tmp_path / "net.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def patches(module: ModuleType, **second: bool) -> Patches:
    return Patches(gradscope.plan(module.Net(**second), torch.ones(2, 5, 8), recipes=["attention"]))


def test_both_may_change(module: ModuleType) -> None:
    found = patches(module)
    assert [site.path for site in found.kept] == ["one", "two"] == [site.path for site in found.in_source]
    assert found.diff.startswith("--- a/net.py\n+++ b/net.py\n")


def test_one_is_left_as_it_is(module: ModuleType) -> None:
    """The second keeps its weights: what the first may have would change it."""
    found = patches(module, keep=True)
    assert [site.path for site in found.kept] == ["one"]
    assert found.in_source == [] and found.diff == "" and found.texts == {}


def test_one_runs_the_line_without_the_pattern(module: ModuleType) -> None:
    found = patches(module, bias=True)
    assert [site.path for site in found.kept] == ["one"] and [site.path for site in found.sites] == ["one"]
    assert found.in_source == []


def test_a_file_without_a_last_line_end(module: ModuleType) -> None:
    found = patches(module)
    ((before, after),) = found.texts.values()
    assert before == MODEL
    subprocess.run(["patch", "-p1"], input=found.diff, text=True, check=True, capture_output=True)
    assert Path("net.py").read_text() == after
    sys.modules.pop("net", None)


GATED = """import torch
import torch.nn.functional as F
from torch import nn


class Gated(nn.Module):
    def __init__(self, how="none", act=None):
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = MADE

    def forward(self, x):
        return self.act(self.gate(x)) * self.up(x)
"""


@pytest.mark.parametrize("how", ["none", "tanh"])
@pytest.mark.parametrize(
    ("made", "asks"), [("act or nn.GELU(how)", True), ("nn.GELU(how)", True), ("nn.GELU()", False)]
)
def test_an_activation_of_another_formula_in_another_instance(tmp_path: Path, made: str, asks: bool, how: str) -> None:
    before = _loaded(tmp_path / "gated.py", GATED.replace("MADE", made))
    found = Patches(gradscope.plan(before.Gated(how if asks else "none"), torch.ones(2, 8), recipes=["geglu"]))
    ((_, text),) = found.texts.values()
    assert "geglu(" in text and ("self.act.approximate ==" in text) == asks
    after = _loaded(tmp_path / "gated_after.py", text)
    x = torch.randn(2, 8)
    for each in ("none", "tanh"):
        old, new = before.Gated(each), after.Gated(each)
        new.load_state_dict(old.state_dict())
        torch.testing.assert_close(new(x), old(x), rtol=1e-6, atol=1e-6)  # the two formulas differ by 1e-4


def _loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
