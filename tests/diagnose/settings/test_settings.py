"""Rules about torch's switches, the optimizer and number formats, on models that are really profiled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.capture.environment import current_settings
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests.diagnose.run_case import Twin, case_of, findings_of
from tests.diagnose.twins_settings import TWINS, HalfAttention, Repeated, during, stack


def of_rule(findings: Sequence[Finding], rule: str) -> list[Finding]:
    return [each for each in findings if each.rule == rule]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_rule_tells_the_twins_apart(twin: Twin) -> None:
    assert len(of_rule(findings_of(**twin.bad()), twin.rule)) == 1
    assert of_rule(findings_of(**twin.good()), twin.rule) == []


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_words_of_twins(twin: Twin) -> None:
    for finding in of_rule(findings_of(**twin.bad()), twin.rule):
        assert not finding.message.endswith(".")
        assert finding.advice.endswith(".") and finding.advice[0].isupper()
        assert finding.code and finding.evidence


# ---------------------------------------------------------------------------------------------- anomaly-mode


def test_anomaly_mode_is_named_with_its_searches() -> None:
    batch = during(lambda: torch.autograd.set_detect_anomaly(True), torch.ones(16, 32))
    (finding,) = of_rule(findings_of(stack(), batch), "anomaly-mode")
    assert finding.message == (
        "Anomaly mode is on: every autograd node stores a Python stack trace, and every gradient is checked for NaN"
    )
    assert "NaN checks took" in finding.evidence
    assert finding.predicted_saving_ns is not None and finding.predicted_saving_ns > 0


def test_anomaly_mode_without_the_search_for_nan() -> None:
    batch = during(lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), torch.ones(16, 32))
    (finding,) = of_rule(findings_of(stack(), batch), "anomaly-mode")
    assert finding.message == "Anomaly mode is on: every autograd node stores a Python stack trace"
    assert "NaN" not in finding.evidence


def test_anomaly_mode_inside_a_step_is_seen_by_its_searches() -> None:
    model, batch = stack(), torch.ones(16, 32)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            with torch.autograd.set_detect_anomaly(True):
                model(batch).mean().backward()
            if prof.step():
                break
    assert len(of_rule(prof.report.data.findings, "anomaly-mode")) == 1


def test_a_users_own_search_for_nan_is_not_anomaly_mode() -> None:
    model = stack()
    model[0].weight.register_hook(lambda gradient: torch.where(torch.isnan(gradient).any(), 0.0, gradient))
    assert of_rule(findings_of(model, torch.ones(16, 32)), "anomaly-mode") == []


# ---------------------------------------------------------------------------------------------- zero-grad-fills


@pytest.mark.parametrize("how", ["optimizer", "module", "by hand"])
def test_zeros_in_a_loop_of_ones_own(how: str) -> None:
    model, batch = stack(2, 1024), torch.ones(1, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            if how == "by hand":
                for each in model.parameters():
                    if each.grad is not None:
                        each.grad.zero_()
            else:
                (optimizer if how == "optimizer" else model).zero_grad(set_to_none=False)
            model(batch).mean().backward()
            optimizer.step()
            if prof.step():
                break
    (finding,) = of_rule(prof.report.data.findings, "zero-grad-fills")
    assert finding.line is not None and finding.line.startswith("tests/diagnose/settings/test_settings.py:")
    assert finding.evidence.startswith("4 gradients (8.40 MB) are zero-filled in ")
    assert "accumulating into them in backward takes" in finding.evidence
    assert finding.predicted_saving_ns is None  # on a CPU: gradients made anew may cost as much
    assert finding.predicted_high_ns


def test_zeroing_something_else_is_not_about_gradients() -> None:
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("state", torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("state").zero_()
            return self.layer(x).mean()

    assert of_rule(findings_of(State(), torch.ones(8, 64)), "zero-grad-fills") == []


# ---------------------------------------------------------------------------------------------- autocast-casts


def test_casts_are_counted() -> None:
    (finding,) = of_rule(findings_of(Repeated(cache=False), torch.ones(8, 256)), "autocast-casts")
    assert list(finding.layers) == ["layer"]
    # Six uses of a weight of 256 · 256 and a bias of 256.
    assert finding.evidence.startswith(
        "12 weight casts per step where 2 are enough: 1.97 MB of unnecessary reads and writes"
    )


def test_casts_of_a_context_entered_again_and_again() -> None:
    class Loop(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = torch.tanh(self.layer(x))
            return x.float().mean()

    findings = findings_of(Loop(cache=True), torch.ones(8, 256))
    assert len(of_rule(findings, "autocast-casts")) == 1


def test_float32_activations_are_not_weights() -> None:
    class Loop(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(self.times):
                    x = torch.tanh(self.layer(x).float())
            return x.mean()

    assert of_rule(findings_of(Loop(cache=True), torch.ones(8, 256)), "autocast-casts") == []


# ---------------------------------------------------------------------------------------------- float16-softmax


def test_float16_scores_are_named_with_their_copy() -> None:
    case = case_of(HalfAttention(first=False), torch.ones(2, 48, 32, dtype=torch.float16))
    (finding,) = RULES["float16-softmax"].find(case)
    assert finding.message == (
        "Attention scores are computed in float16 before scaling and may overflow; "
        "the scores are then copied to float32 for the softmax"
    )
    assert finding.evidence == (
        "each score sums 32 products of unscaled values; the largest float16 value is 65504; "
        "the float32 scores take 18.4 kB in addition to the float16 ones"
    )
    assert finding.predicted_saving_bytes == 2 * 48 * 48 * 4
    assert finding.line is not None and "twins_settings.py:" in finding.line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_do_not_overflow(dtype: torch.dtype) -> None:
    class Attention(HalfAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, dim=-1)
            scores = (q @ k.transpose(-2, -1)) / q.size(-1) ** 0.5
            return (scores.float().softmax(-1).to(v.dtype) @ v).float().mean()

    findings = findings_of(Attention(first=False).to(dtype), torch.ones(2, 48, 32, dtype=dtype))
    assert of_rule(findings, "float16-softmax") == []


def test_a_softmax_of_classes_is_not_attention() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 32).half()

        def forward(self, x: Tensor) -> Tensor:
            y = self.project(x)
            return (y @ y.transpose(-2, -1)).float().softmax(-1).mean()

    findings = findings_of(Classes(), torch.ones(2, 48, 32, dtype=torch.float16))
    assert of_rule(findings, "float16-softmax") == []


# ---------------------------------------------------------------------------------------------- settings


def test_settings_follow_torchs_switches() -> None:
    assert current_settings()["anomaly"] is False
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found_now = current_settings()
    assert found_now["anomaly"] is True and found_now["anomaly_nan"] is False
    assert found_now["deterministic"] is False and found_now["fill_uninitialized"] is True
    assert found_now["matmul_precision"] == "highest" and found_now["threads"] == torch.get_num_threads()
    assert found_now["validate_args"] is torch.distributions.Distribution._validate_args
