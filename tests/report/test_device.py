"""The device in the header is the one that the steps ran on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradscope
from gradscope.report.header import device_text


def test_a_model_whose_parameters_are_passed_to_it() -> None:
    """``functional_call`` is often given a model without storage; the steps run where the passed parameters lie."""
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 1, device="meta"))
    given = {name: torch.randn(each.shape, requires_grad=True) for name, each in model.named_parameters()}
    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        for _ in range(20):
            torch.func.functional_call(model, given, (torch.ones(2, 4),)).sum().backward()
            if prof.step():
                break
    assert prof.report.data.environment["device"] == "cpu"


@pytest.mark.parametrize(("threads", "text"), [(1, "cpu · 1 thread"), (2, "cpu · 2 threads")])
def test_threads(threads: int, text: str) -> None:
    assert device_text({"device": "cpu", "threads": threads}) == text
