"""A model that ends the process, or that of a fork, while gradscope runs its steps: as a script that does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradscope

_MODEL = """
import os, sys
import torch
from torch import nn

class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.steps = nn.Linear(8, 8), 0

    def forward(self, x):
        self.steps += 1
        if self.steps == 14:
            LEAVE
        return self.inner(x)

def workload():
    return Leaving(), torch.randn(4, 8)
"""
_FORKS = """
            child = os.fork()
            if child == 0:
                RAISE
            print("it ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _profiled(folder: Path, leave: str) -> tuple[int, str, str]:
    (folder / "model.py").write_text(_MODEL.replace("LEAVE", leave))
    command = [sys.executable, "-m", "gradscope", "profile", "model.py", "--no-html", "-q"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("leave", "code", "text"),
    [("sys.exit(7)", 7, ""), ("sys.exit()", 0, ""), ("sys.exit('enough')", 1, "enough\n")],
)
def test_what_was_measured_is_reported(leave: str, code: int, text: str, tmp_path: Path) -> None:
    ended, out, err = _profiled(tmp_path, leave)
    assert (ended, err) == (code, text)
    assert out.startswith("gradscope ") and "PARTIAL" in out
    assert json.loads((tmp_path / "gradscope-model.json").read_text())["partial"]


@pytest.mark.parametrize(("leave", "code"), [("sys.exit(5)", 5), ("1 / 0", 1)])
def test_a_fork_reports_nothing(leave: str, code: int, tmp_path: Path) -> None:
    ended, out, err = _profiled(tmp_path, _FORKS.strip().replace("RAISE", leave))
    assert ended == 0 and ("ZeroDivisionError" in err) == (code == 1), err
    assert f"it ended with {code}\n" in out
    assert out.count("gradscope 0") == 1
    assert not json.loads((tmp_path / "gradscope-model.json").read_text())["partial"]


def test_the_caller_is_left_as_the_model_leaves() -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            if self.steps == 14:
                sys.exit(7)
            out: Tensor = self.inner(x)
            return out

    with pytest.raises(SystemExit) as left:
        gradscope.profile(Leaving(), torch.ones(4, 8))
    assert left.value.code == 7
