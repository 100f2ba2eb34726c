"""Rules about torch's switches and the optimizer, on steps of a GPU made up for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding, KernelRow, Ledger, OpRow, OptimizerFact, RunData, StepTimes, WorkloadInfo
from tests.diagnose.made_graph import changed_call, made_call, made_value

OURS = {
    "anomaly-mode",
    "deterministic-mode",
    "tf32-off",
    "optimizer-unfused",
    "zero-grad-fills",
    "channels-last",
    "denormals",
    "autocast-casts",
    "float16-softmax",
}
STEP_NS = 100_000_000


def made_case(
    ops: Sequence[OpRow] = (),
    calls: Sequence[Node] = (),
    kernels: Sequence[KernelRow] = (),
    optimizers: Sequence[OptimizerFact] = (),
    device: str = "cuda",
    **settings: Any,
) -> Case:
    """A step of 100 ms of which only this is known."""
    step = StepTimes(STEP_NS, STEP_NS, 0, 0, 0, {}, None, None)
    run = RunData(
        gradscope="0",
        partial=False,
        environment={"device": device},
        workload=WorkloadInfo("model.py", "model", 1, 1, "given"),
        step=step,
        ledger=Ledger(0, 0, 0, 0, 0, 0, 0, 0, 0),
        layers=(),
        lines=(),
        ops=tuple(ops),
        kernels=tuple(kernels),
    )
    facts = StepFacts(calls=tuple(calls), optimizers=tuple(optimizers), settings=settings, recorded=bool(calls))
    return Case(run, facts)


def tensor(*shape: int, dtype: str = "float32", device: str = "cuda", **more: Any) -> Value:
    strides = tuple(int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape)))
    return made_value(shape, dtype, device, requires_grad=True, **{"strides": strides, **more})


def call(op: str, inputs: Sequence[Value], output: Value, layer: str = "body", **more: Any) -> Node:
    return made_call(op, inputs, [output], layer=layer, **{"source": "model.py:7", **more})


def found(rule: str, case: Case) -> list[Finding]:
    return list(RULES[rule].find(case))


@pytest.mark.parametrize("name", sorted(OURS))
def test_says_what_it_is_and_where_it_is_from(name: str) -> None:
    rule = RULES[name]
    assert rule.title[0].islower() and not rule.title.endswith(".")
    for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"):
        assert part in rule.about


@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_is_silent_where_nothing_is_known(name: str, device: str) -> None:
    case = made_case(device=device)
    assert found(name, case) == []
    step = replace(case.run.step, wall_ns=0, forward_ns=0)
    assert found(name, Case(replace(case.run, step=step), StepFacts())) == []


def check_words(finding: Finding) -> None:
    assert not finding.message.endswith(".")
    assert finding.advice.endswith(".") and finding.advice[0].isupper()
    assert finding.code and finding.evidence
    if finding.predicted_saving_ns is not None:
        assert finding.predicted_low_ns is not None and finding.predicted_high_ns is not None
        assert finding.predicted_low_ns <= finding.predicted_saving_ns <= finding.predicted_high_ns


# ---------------------------------------------------------------------------------------------- anomaly-mode


def test_switches_of_cuda_are_named() -> None:
    names = [each.code for each in found("anomaly-mode", made_case(launch_blocking=True, no_caching=True))]
    assert names == ["unset CUDA_LAUNCH_BLOCKING", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"]
    assert found("anomaly-mode", made_case(device="cpu", launch_blocking=True)) == []
    assert found("anomaly-mode", made_case(launch_blocking=False, no_caching=False)) == []


# ---------------------------------------------------------------------------------------------- deterministic-mode

SCATTER = OpRow("body", "backward", "aten::index_put_", 2, 20_000_000)


def test_deterministic_mode_names_the_operations() -> None:
    (finding,) = found("deterministic-mode", made_case([SCATTER], deterministic=True, fill_uninitialized=True))
    check_words(finding)
    assert finding.severity == "warning"
    assert list(finding.layers) == ["body"]
    assert finding.evidence == ("2 index_put_: 20.0 ms per step (20.0 %); every new uninitialized tensor is filled")


@pytest.mark.parametrize(
    "case",
    [
        made_case([SCATTER], deterministic=False),
        made_case([SCATTER], deterministic=True, device="cpu"),  # there the other variant is not faster
        made_case([replace(SCATTER, self_ns=100_000)], deterministic=True),
        made_case([replace(SCATTER, name="aten::mm")], deterministic=True),
    ],
    ids=["off", "on the CPU", "too small", "no such operation"],
)
def test_deterministic_mode_is_left_alone(case: Case) -> None:
    assert found("deterministic-mode", case) == []


# ---------------------------------------------------------------------------------------------- tf32-off

MATMUL = OpRow("body", "forward", "aten::addmm", 12, 40_000_000)
LINEAR = call("linear", [tensor(8, 64), tensor(64, 64), tensor(64)], tensor(8, 64))
HOPPER = {"matmul_precision": "highest", "capability": [9, 0]}


def test_tf32_off_counts_the_products() -> None:
    (finding,) = found("tf32-off", made_case([MATMUL], [LINEAR], **HOPPER))
    check_words(finding)
    assert finding.severity == "critical"
    assert finding.predicted_saving_ns == 20_000_000
    assert finding.evidence == (
        "12 float32 matmuls in forward and backward, 40.0 ms per step (40.0 %); compute capability 9.0"
    )


def test_tf32_off_estimates_nothing_for_cards_that_may_not_gain() -> None:
    (finding,) = found("tf32-off", made_case([MATMUL], [LINEAR], **{**HOPPER, "capability": [8, 9]}))
    assert finding.severity == "info" and finding.predicted_saving_ns is None


@pytest.mark.parametrize(
    ("calls", "changed"),
    [
        ([LINEAR], {"device": "cpu"}),
        ([LINEAR], {"capability": [7, 5]}),
        ([LINEAR], {"capability": None}),
        ([LINEAR], {"matmul_precision": "high"}),
        ([replace(LINEAR, autocast=True)], {}),
        ([LINEAR, replace(LINEAR, outputs=(tensor(8, 64, dtype="bfloat16"),))], {}),
        ([], {}),
    ],
    ids=["CPU", "older card", "unknown card", "on already", "autocast", "another dtype too", "not recorded"],
)
def test_tf32_off_is_left_alone(calls: list[Node], changed: dict[str, Any]) -> None:
    assert found("tf32-off", made_case([MATMUL], calls, **{**HOPPER, **changed})) == []


# ---------------------------------------------------------------------------------------------- optimizer-unfused

STEP = OpRow(None, "optimizer", "aten::addcdiv_", 40, 10_000_000)
ADAMW = OptimizerFact("AdamW", None, None, 40, 1_000_000)


def test_unfused_optimizer_is_measured() -> None:
    (finding,) = found("optimizer-unfused", made_case([STEP], optimizers=[ADAMW], device="cpu"))
    check_words(finding)
    assert finding.evidence == "10.0 ms per step (10.0 %) for 40 tensors of 1.00 M elements"
    assert finding.predicted_saving_ns == 7_000_000
    assert finding.code == "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)"


@pytest.mark.parametrize(
    ("optimizer", "device", "fires"),
    [
        (ADAMW, "cuda", True),
        (replace(ADAMW, class_name="SGD"), "cuda", True),
        (replace(ADAMW, class_name="SGD"), "cpu", False),
        (replace(ADAMW, class_name="Adagrad"), "cpu", True),
        (replace(ADAMW, class_name="RMSprop"), "cuda", False),
        (replace(ADAMW, class_name="MyAdam"), "cpu", False),
        (replace(ADAMW, fused=True), "cuda", False),
    ],
)
def test_optimizers_that_can_be_fused(optimizer: OptimizerFact, device: str, fires: bool) -> None:
    assert bool(found("optimizer-unfused", made_case([STEP], [LINEAR], optimizers=[optimizer], device=device))) == fires


def test_small_or_sparse_optimizers_are_left_alone() -> None:
    small = replace(STEP, self_ns=2_000_000)
    clearing = replace(STEP, name="aten::fill_")
    assert found("optimizer-unfused", made_case([small, clearing], optimizers=[ADAMW])) == []
    lookup = changed_call(LINEAR, {"sparse": True}, op="embedding")
    assert found("optimizer-unfused", made_case([STEP], [lookup], optimizers=[ADAMW])) == []


# ---------------------------------------------------------------------------------------------- channels-last

TURN = KernelRow("conv", "forward", "void cudnn::engines_precompiled::nchwToNhwcKernel<half>", 8, 5_000_000)
NCHW = tensor(8, 16, 32, 32, dtype="float16")
CONV = call("conv2d", [NCHW, tensor(16, 16, 3, 3, dtype="float16")], NCHW, layer="conv")


def test_layouts_that_are_turned_are_named() -> None:
    (finding,) = found("channels-last", made_case(calls=[CONV], kernels=[TURN]))
    check_words(finding)
    assert list(finding.layers) == ["conv"] and finding.line == "model.py:7"
    assert finding.evidence == "8 layout-conversion kernels in 1 layer, 5.00 ms per step"
    assert finding.severity == "warning"


def test_layouts_that_are_right_are_left_alone() -> None:
    last = tensor(8, 16, 32, 32, dtype="float16", strides=(16 * 32 * 32, 1, 32 * 16, 16))
    right = replace(CONV, inputs=(last, CONV.inputs[1]))
    assert found("channels-last", made_case(calls=[right], kernels=[TURN])) == []
    assert found("channels-last", made_case(calls=[CONV], kernels=[replace(TURN, name="sm90_xmma_fprop")])) == []
    assert found("channels-last", made_case(calls=[CONV], kernels=[TURN], device="cpu")) == []
