"""Layers too small to fill the device, on runs made by hand; and normalization that autocast runs in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.diagnose.bounds import bounded
from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding, KernelRow, Limits, StepTimes
from tests.diagnose.bound_cases import LIMITS
from tests.diagnose.run_case import case_of, timed_by_operations
from tests.diagnose.timing_cases import MS, call, check_words, made_case, op, row, tensor


def found(case: Case, rule: str = "device-unfilled") -> list[Finding]:
    return list(RULES[rule].find(case))


# ---------------------------------------------------------------------------------------------- on the CPU


def small(
    bound: str | None = "overhead", limits: Limits | None = LIMITS, time: int = 5 * MS, calls: float = 40
) -> Case:
    layers = [row(f"layers.{i}", time, time, "Linear", bound_by=bound) for i in range(4)]
    ops = [op(each.path, "forward", "aten::addmm", time, calls) for each in layers]
    case = made_case(layers, ops)
    return Case(case.run, case.facts, limits)


def test_layers_whose_calls_take_the_time() -> None:
    (finding,) = found(small())
    check_words(finding)
    assert list(finding.layers) == [f"layers.{i}" for i in range(4)] and finding.severity == "warning"
    assert finding.evidence == (
        "layers.0, layers.1, layers.2 and 1 more: 160 calls per step, 250 µs each; the smallest possible call takes "
        "1.00 µs; 40.0 ms in total, 40.0 % of the step"
    )
    assert finding.predicted_saving_ns is None and finding.predicted_high_ns == 160_000


@pytest.mark.parametrize(
    "case",
    [small("bandwidth"), small(None), small(limits=None), small(time=2 * MS), small(calls=10)],
    ids=["bandwidth", "not known", "no limits", "a small part", "few calls"],
)
def test_layers_that_are_left_alone(case: Case) -> None:
    assert found(case) == []


def test_small_calls_far_from_any_limit() -> None:
    def case(limit: int) -> Case:
        made = small("bandwidth", time=5 * MS)
        rows = [
            replace(each, forward_limit_ns=limit, backward_limit_ns=limit) if each.bound_by else each
            for each in made.run.layers
        ]
        limits = replace(LIMITS, call_ns=5 * MS / 40 / 4)
        return Case(replace(made.run, layers=tuple(rows)), replace(made.facts, settings={}), limits)

    slow = replace(case(5_000).run.step, overhead=2.0)  # so that far-from-limit says nothing
    few = case(5_000)
    (finding,) = found(Case(replace(few.run, step=slow), few.facts, few.limits))
    assert len(finding.layers) == 4
    near = case(2 * MS)
    assert found(Case(replace(near.run, step=slow), near.facts, near.limits)) == []


class Many(nn.Module):
    """Many small modules, one after the other, without a loop over operations."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(width, width), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


def bounded_case(model: nn.Module, batch: Tensor, call_ns: float) -> Case:
    case = timed_by_operations(case_of(model, batch))
    limits = Limits("cpu", {"float32": 1e11}, 1e10, call_ns)
    case = Case(case.run, case.facts, limits)
    return Case(replace(case.run, layers=bounded(case)), case.facts, limits)


def test_a_model_of_many_small_modules() -> None:
    case = bounded_case(Many(40, 8), torch.ones(4, 8), 50_000.0)
    assert found(case, "tiny-layers") == []  # a stack is no loop
    (finding,) = found(case)
    assert len(finding.layers) >= 40 and finding.code == "model = torch.compile(model)"
    assert found(bounded_case(Many(2, 512), torch.ones(512, 512), 100.0)) == []


@pytest.mark.parametrize("u", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
def test_a_loop_is_for_the_other_rule(u: nn.Module) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u = u

        def forward(self, x: Tensor) -> Tensor:
            h = x[:, 0]
            for t in range(x.shape[1]):
                h = torch.tanh(self.u(h) + x[:, t])
            return h.mean()

    case = bounded_case(Loop(), torch.ones(4, 40, 8), 50_000.0)
    looped = {path for each in found(case, "tiny-layers") for path in each.layers}
    assert looped
    assert not any(set(each.layers) & looped for each in found(case))


# ---------------------------------------------------------------------------------------------- on a GPU


def on_gpu(kernel_ns: int = 4_000, idle: float = 0.8, unprofiled: int | None = 60 * MS, **more: Any) -> Case:
    settings = {"bound_by": "overhead", "launch_ns": 9 * MS, **more}
    layers = [row(f"h.{i}", 5 * MS, 10 * MS, "Linear", idle_ns=round(idle * 10 * MS), **settings) for i in range(4)]
    case = made_case(layers, device="cuda")
    kernels = [KernelRow(each.path, "backward", "gemm", 100, 100 * kernel_ns) for each in layers]
    step: StepTimes = replace(case.run.step, unprofiled_wall_ns=unprofiled)
    return Case(replace(case.run, kernels=tuple(kernels), step=step), case.facts)


def test_kernels_that_do_not_fill_the_gpu() -> None:
    (finding,) = found(on_gpu())
    check_words(finding)
    assert finding.evidence == (
        "h.0, h.1, h.2 and 1 more: 400 kernels per step, 4.00 µs each; the GPU was idle for 32.0 ms of 40.0 ms "
        "of backward; 60.0 % of the step"
    )
    assert finding.predicted_high_ns == 32 * MS and "reduce-overhead" in finding.code


def test_without_limits_the_launches_must_explain_it() -> None:
    assert len(found(on_gpu(bound_by=None))) == 1
    assert found(on_gpu(bound_by=None, launch_ns=1 * MS)) == []


@pytest.mark.parametrize(
    "case",
    [
        on_gpu(kernel_ns=50_000),
        on_gpu(idle=0.3),
        on_gpu(bound_by="waiting"),
        on_gpu(bound_by="bandwidth"),
        on_gpu(kernel_ns=9_000, unprofiled=5 * MS),
    ],
    ids=["large kernels", "busy", "waiting", "bandwidth", "only the profiler makes it wait"],
)
def test_a_gpu_that_is_left_alone(case: Case) -> None:
    assert found(case) == []


def test_settings_that_make_every_launch_wait_are_left_alone() -> None:
    case = on_gpu()
    assert found(Case(case.run, StepFacts(settings={"launch_blocking": True}))) == []


# ---------------------------------------------------------------------------------------------- autocast-norms


def norms(
    given: str = "bfloat16", made: str = "float32", casts: float = 1.0, device: str = "cuda", *, autocast: bool = True
) -> Case:
    result = tensor(8, 64, dtype=made, device=device)
    first = call("layer_norm", [tensor(8, 64, dtype=given, device=device)], [result], layer="norm", autocast=autocast)
    lowered = tensor(8, 64, dtype="bfloat16", device=device)
    second = call("linear", [result, tensor(64, 64, device=device)], [lowered], layer="up", index=1, autocast=True)
    ops = [
        op("norm", "forward", "aten::_to_copy", MS, casts),
        op("norm", "forward", "aten::copy_", 2 * MS, casts),
        op("norm", "forward", "aten::native_layer_norm", 9 * MS),
        op("norm", "backward", "ToCopyBackward0", MS),
        op("norm", "backward", "aten::copy_", 2 * MS),
    ]
    rows = [row("norm", 12 * MS, 3 * MS, "LayerNorm"), row("up", MS, MS, "Linear")]
    facts = StepFacts(calls=(first, second), recorded=True)
    return made_case(rows, ops, facts=facts, device=device)


def test_norms_that_autocast_raises() -> None:
    (finding,) = found(norms(), "autocast-norms")
    check_words(finding)
    assert list(finding.layers) == ["norm"] and finding.line == "model.py:12"
    assert finding.evidence == (
        "1 normalization calls with bfloat16 inputs run in float32; the results of 1 are cast back down; "
        "casting their inputs takes 6.00 ms per step in forward and backward"
    )
    estimate = (finding.predicted_low_ns, finding.predicted_saving_ns, finding.predicted_high_ns)
    assert estimate == (3 * MS, 4_800_000, 5_700_000) and finding.cost_ns == 6 * MS


def test_casts_that_may_be_of_weights_are_not_counted() -> None:
    (finding,) = found(norms(casts=3.0), "autocast-norms")
    assert finding.predicted_saving_ns is None and finding.severity == "info"


@pytest.mark.parametrize(
    "case",
    [
        norms(given="float32"),
        norms(made="bfloat16"),
        norms(autocast=False),
        norms(device="cpu"),
    ],
    ids=["float32 already", "low already", "no autocast", "CPU"],
)
def test_norms_that_are_left_alone(case: Case) -> None:
    assert found(case, "autocast-norms") == []


def test_norms_under_autocast_on_the_cpu_are_not_raised() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.norm(self.up(x)).float().mean()

    assert found(case_of(Normed(), torch.ones(4, 32)), "autocast-norms") == []


def test_the_code_of_the_advice_runs_in_the_inputs_dtype() -> None:
    (finding,) = found(norms(), "autocast-norms")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"torch": torch, "F": F, "x": x.bfloat16(), "shape": (64,)}
    names |= {"weight": torch.ones(64), "bias": torch.zeros(64)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exec(finding.code.replace('"cuda"', '"cpu"'), names)
    assert names["y"].dtype == torch.bfloat16
    torch.testing.assert_close(names["y"].float(), F.layer_norm(x.bfloat16().float(), (64,)), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("rule", ["device-unfilled", "autocast-norms"])
def test_nothing_known_is_nothing_found(rule: str) -> None:
    assert found(made_case(), rule) == [] and found(made_case(device="cuda", wall=0, forward=0), rule) == []
    about = RULES[rule].about
    assert all(part in about for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"))
