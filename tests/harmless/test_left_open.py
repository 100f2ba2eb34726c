"""A session that a program begins by hand and never ends, as in a notebook or a trainer that is stopped."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import torch
from torch import nn

import gradscope

model = nn.Linear(4, 4)
prof = gradscope.profiling(model, steps=3, warmup=1)
prof.__enter__()
for number in range(9):
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    prof.step()
    if number == int(sys.argv[1]):
        sys.exit(3)
"""


@pytest.mark.parametrize("number", [1, 4, 5])
def test_the_exit_code_is_the_programs(number: int) -> None:
    """Torch's profiler, left running, ends the process with a fault where Python ends."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(number)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
