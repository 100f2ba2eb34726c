"""Models whose classes give torch's method names a meaning of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_MODEL = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.GELU(approximate="tanh")
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.last(self.act(self.first(x))) * self.scale

model = Net()
tensors = list(model.parameters())
"""
_TRAINING = """
optimizer = torch.optim.SGD(tensors, lr=0.1)
losses = []
for _ in range(40):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[:8])
"""
_NAMES = ["parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"]


def _run(folder: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, timeout=600)


@pytest.mark.parametrize(
    "meaning",
    [
        pytest.param(f"for name in {_NAMES}: setattr(Net, name, lambda self, group: [group])", id="needs an argument"),
        pytest.param(
            f"for name in {_NAMES}: setattr(Net, name, property(lambda self: 1 / 0))", id="a property that raises"
        ),
        pytest.param(f"for name in {_NAMES}: setattr(Net, name, lambda self, *_, **__: None)", id="gives nothing"),
        pytest.param(
            "Net.parameters = lambda self: [{'params': tensors, 'lr': 0.1}]", id="gives an optimizer's groups"
        ),
    ],
)
def test_the_report_is_that_of_a_plain_class(meaning: str, tmp_path: Path) -> None:
    text = f"{_MODEL}\n{meaning}\n{_TRAINING}"
    alone = _run(tmp_path, text, "train.py")
    command = ["-m", "gradscope", "profile", "train.py", "--no-html", "--steps", "2", "--run-to-end"]
    profiled = _run(tmp_path, text, *command)
    assert (alone.returncode, profiled.returncode) == (0, 0), profiled.stderr
    assert alone.stdout in profiled.stdout
    assert "Traceback" not in profiled.stderr
    run: dict[str, Any] = json.loads((tmp_path / "gradscope-train.json").read_text())
    assert not run["partial"]
    assert not [note for note in run["notes"] if "Error: " in note]
    assert {layer["path"] for layer in run["layers"]} >= {"", "first", "act", "last"}
    assert run["workload"]["model"] == "Net"
    assert run["workload"]["parameters"] == 8 * 8 + 8 + 8 + 1
    assert run["memory"]["peak_bytes"] > 0
