"""TORCH_COMPILE_DISABLE=1, or the setting behind it: the program runs as it is written, and is measured so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradscope

# Loading Dynamo warns of its own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")

_NEVER_STEADY = ("vary too much", "waited")


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_what_is_switched_off_is_measured_as_it_is_written(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(4, 8)
    with torch._dynamo.config.patch(disable=True):
        if how == "module.compile":
            model.compile()
        run = torch.compile(model) if how == "torch.compile" else model
        with gradscope.profiling(model, steps=2, warmup=2) as prof:
            while True:
                run(x).square().sum().backward()
                if prof.step():
                    break
        data = prof.report.data
    rows = {row.path: row for row in data.layers}
    assert rows["0"].forward_flops == 2 * 4 * 8 * 16 and rows["2"].backward_flops == 2 * 2 * 4 * 16 * 4
    assert {line.line for line in data.lines if line.backward_ns}
    assert not [note for note in data.notes if not any(words in note for words in _NEVER_STEADY)]


def test_a_step_of_the_wrapper_is_recorded() -> None:
    """The module that torch.compile puts around a model is no layer."""
    x = torch.randn(4, 8)
    with torch._dynamo.config.patch(disable=True):
        report = gradscope.profile(torch.compile(nn.Linear(8, 4)), x, lambda out, _: out.sum(), steps=2, warmup=1)
    assert not any("could not be read" in note for note in report.data.notes)
