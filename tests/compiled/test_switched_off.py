"""Where nothing is compiled: switched off by the environment, or for a backend that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .test_models import environment

# In a process of its own: what is compiled before the setting is made runs on.
PROGRAM = """
import json, sys
import torch
from torch import nn
import gradscope

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
x = torch.randn(4, 8)
if sys.argv[1] == "profile":
    data = gradscope.profile(torch.compile(model), x, lambda out, _: out.square().sum(), steps=2, warmup=1).data
else:
    if sys.argv[1] == "module.compile":
        model.compile()
    run = torch.compile(model) if sys.argv[1] == "torch.compile" else model
    with gradscope.profiling(model, steps=2, warmup=2) as prof:
        while True:
            run(x).square().sum().backward()
            if prof.step():
                break
    data = prof.report.data
rows = {row.path: row for row in data.layers}
assert rows["0"].forward_flops == 2 * 4 * 8 * 16 and rows["2"].backward_flops == 2 * 2 * 4 * 16 * 4
assert any(line.backward_ns for line in data.lines)
unsteady = ("vary too much", "waited")
notes = [note for note in data.notes if not any(words in note for words in unsteady)]
assert not notes, notes
"""


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "profile"])
def test_what_is_switched_off_is_measured_as_it_is_written(how: str) -> None:
    """The module that torch.compile puts around a model is no layer, and its step is recorded for the recipes."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**environment(), "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


FAILING = """
import torch
from torch import nn
import gradscope

torch._dynamo.config.suppress_errors = True

def fails(graph, inputs):
    raise RuntimeError("planted")

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
run, x = torch.compile(model, backend=fails), torch.randn(4, 8)
with gradscope.profiling(model, steps=2, warmup=2) as prof:
    while True:
        run(x).square().sum().backward()
        if prof.step():
            break
data = prof.report.data
rows = {row.path: row for row in data.layers}
assert rows["0"].backward_total_ns and rows["2"].backward_total_ns and rows["0"].forward_flops is None
assert "compile-failed" in {finding.rule for finding in data.findings}
(note,) = [note for note in data.notes if "source lines" in note]
assert note.startswith("inside of functions on which torch.compile fails (see compile-failed)"), note
"""


def test_a_note_says_that_what_fails_to_compile_has_no_lines() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FAILING], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
