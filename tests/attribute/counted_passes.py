"""Loops that are measured to count what their backward passes did, by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradscope
from gradscope.tables import RunData

X = torch.ones(2, 4)
STEPS = 4
WALKING = "gradscope.capture.phases.timed.WALKING"
MISFIT = "used their values differently"


def measured(model: nn.Module, sums: dict[str, int] | None = None) -> tuple[RunData, Counter[str], Counter[str]]:
    """The report of a loop, and how many gradients each layer's parameters were given in the measured steps.

    Args:
        sums: gradient sums that the model says it caused, by layer; it adds to it in each step.
    """
    each: list[tuple[Counter[str], Counter[str]]] = []
    owner: dict[int, str] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            owner.setdefault(id(parameter), path)  # a tied one is its first holder's
    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        while True:
            profiled = bool(torch.autograd.profiler._is_profiler_enabled)
            model.zero_grad(set_to_none=True)
            if sums is not None:
                sums.clear()
            model(X).sum().backward()
            if profiled:
                found = Counter(owner[id(p)] for p in model.parameters() if p.grad is not None)
                each.append((found, Counter(sums or {})))
            if prof.step():
                break
    given, added = Counter[str](), Counter[str]()
    for one, other in each[1 : 1 + STEPS]:
        given += one
        added += other
    return prof.report.data, given, added


def calls(data: RunData, phase: str, name: str) -> Counter[str]:
    """Calls of an operation over all measured steps, by layer."""
    found = Counter[str]()
    for op in data.ops:
        if op.phase == phase and op.name == name:
            found[op.layer if op.layer is not None else "(outside)"] += round(op.calls * STEPS)
    return found


def sums_of(data: RunData) -> Counter[str]:
    return calls(data, "gradient_sum", "aten::add") + calls(data, "gradient_sum", "aten::add_")


def passes_of(step: Callable[[int], Any], **options: Any) -> tuple[Any, RunData]:
    """What was noted of the passes of a loop, and its report."""
    with gradscope.profiling(steps=STEPS, warmup=1, memory=False, **options) as prof:
        for number in range(100):
            step(number)
            if prof.step():
                break
    return prof._session.capture.timed.passes, prof.report.data  # type: ignore[union-attr]
