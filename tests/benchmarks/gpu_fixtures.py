"""What the tests of benchmarks/recipe_gpu share: a timer without a clock, Liger's functions by torch, a small problem.

The benchmarks are imported from here, for they are no package on the path.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    from recipe_gpu import (
        budget,
        command,
        liger,
        measure,
        ops,
        problem,
        published,
        report,
        shapes,
        supervise,
        timer,
        worker,
    )
finally:
    sys.path.remove(str(BENCHMARKS))

__all__ = [
    "budget",
    "command",
    "liger",
    "measure",
    "ops",
    "problem",
    "published",
    "report",
    "shapes",
    "supervise",
    "timer",
    "worker",
]

Budget, Figure = budget.Budget, measure.Figure
Inputs, Kind, Problem, Step, Way = problem.Inputs, problem.Kind, problem.Problem, problem.Step, problem.Way
Limits, Sample = timer.Limits, timer.Sample

LIMITS = Limits(4e12, 8e14)


class Stub:
    """A timer whose every step takes as many ms as it is told, and is run."""

    def __init__(self, *times: float) -> None:
        self.times, self.steps = list(times), 0

    def sample(self, step: Step, host_ms: float = 0.0) -> Sample:
        step()
        self.steps += 1
        return Sample(self.times.pop(0) if self.times else 2.0, 0.5)

    def peak(self, step: Step) -> int:
        step()
        return 3 << 20

    def waits(self, step: Step) -> bool:
        step()
        return False

    def synchronize(self) -> None:
        pass

    def limits(self) -> Limits:
        return LIMITS


def _liger() -> types.ModuleType:
    """Functions with the arguments of Liger 0.8.5's, computed by torch, which overwrite what they are given."""
    found = types.ModuleType("liger_kernel.transformers.functional")

    def spoiling(compute: Callable[..., Any], *tensors: Tensor) -> Any:
        result = compute(*(tensor * 1 if tensor.is_floating_point() else tensor for tensor in tensors))
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
        return result

    def liger_cross_entropy(input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None) -> Tensor:
        return spoiling(F.cross_entropy, input, target)

    def liger_fused_linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor, bias: Any = None) -> Tensor:
        return spoiling(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), input, weight, target)

    def liger_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return spoiling(lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps), x, weight)

    def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return spoiling(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), x, weight, bias)

    def liger_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return spoiling(lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], w, eps), x + r), x, residual, weight)

    def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None) -> tuple[Tensor, Tensor]:
        return spoiling(ops.rope.by_hand, q, k, cos, sin)

    def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
        return spoiling(lambda gate, up: F.silu(gate) * up, a, b)

    for function in (
        liger_cross_entropy,
        liger_fused_linear_cross_entropy,
        liger_rms_norm,
        liger_layer_norm,
        liger_fused_add_rms_norm,
        liger_rope,
        liger_swiglu,
    ):
        setattr(found, function.__name__, function)
    return found


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ways that are for CUDA run here: SDPA by what there is, the recipes' Triton variants by their CPU paths."""
    for name in ("liger_kernel", "liger_kernel.transformers"):
        package = types.ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", _liger())
    monkeypatch.setattr(ops.attention, "sdpa_kernel", lambda backend: nullcontext())
    for module, name in ((ops.attention, "attention"), (ops.packed_attention, "packed_attention")):
        recipe = getattr(module, name)

        def by_any(*given: Any, recipe: Any = recipe, backend: str, **named: Any) -> Tensor:
            assert backend in ("auto", "triton")
            return recipe(*given, **named)

        monkeypatch.setattr(module, name, by_any)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    liger.why_not.cache_clear()
    yield
    liger.why_not.cache_clear()


def small(*ways: Way) -> Problem:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        return Inputs((torch.ones(3, requires_grad=True),), (torch.ones(3),))

    return Problem("op", "N3", make, ways, bytes=8_000_000_000)


def double(x: Tensor) -> Tensor:
    return 2 * x


FIRST, RECIPE = Way("first", Kind.EAGER, double), Way("recipe", Kind.RECIPE, double)


def measured(given: Problem, clock: Stub | None = None, deadline: float = 1e12, **named: Any) -> list[Figure]:
    limit = Budget(deadline, clock=lambda: 0.0)
    named = {"rounds": 3, "problems_after": 0, "device": "cpu", **named}
    return list(measure.measure(given, clock or Stub(), LIMITS, limit, **named))
