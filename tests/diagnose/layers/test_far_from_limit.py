"""The rule about layers that are far from this machine's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding, Limits, PlaceFact
from tests.diagnose.bound_cases import LIMITS, MS, PLAIN, WIDE, Net, case, run
from tests.diagnose.run_case import case_of

RULE = RULES["far-from-limit"]


def found_in(given: Case) -> list[Finding]:
    return list(RULE.find(given))


def test_layers_far_from_their_limit_are_one_finding() -> None:
    (finding,) = found_in(case(run()))
    assert finding.rule == "far-from-limit"
    assert finding.layers == ("h.0", "h.1")
    assert finding.message == "Forward and backward take 600 ms; at this machine's limit they would take 60.0 ms"
    assert finding.evidence == (
        "h.0, h.1: 94.9 % of the step; forward 200 ms (limit 20.0 ms), backward 400 ms (limit 40.0 ms), counting "
        "only its matmuls; most expensive: aten::addmm, 2 calls, 200 ms"
    )
    assert finding.line == "model.py:5"
    assert finding.severity == "warning"
    assert finding.predicted_saving_ns is finding.predicted_low_ns is None
    assert finding.predicted_high_ns == 540 * MS
    assert finding.advice.startswith("Use fewer, larger matmuls") and finding.advice.endswith(".")
    assert finding.code == ""


def test_layers_of_bandwidth_are_told_of_fewer_passes() -> None:
    calls = [replace(WIDE, layer="h.0"), replace(PLAIN, layer="b")]  # b moves 20 MB: 2 ms
    (finding,) = found_in(case(run(slow=1), calls))
    assert finding.layers == ("b",)
    assert finding.message == "Forward and backward take 32.0 ms; at this machine's limit they would take 2.00 ms"
    assert "counting only its memory traffic" in finding.evidence
    assert finding.code == "model.get_submodule('b').compile()"
    assert "torch.compile" in finding.advice


def place(layer: str, **given: Any) -> PlaceFact:
    settings: dict[str, Any] = {"supported": True, "idle": "", "calls": (0,), **given}
    return PlaceFact("attention", "sdpa", layer, "model.py:5", reasons=(), **settings)


def test_where_it_is_silent() -> None:
    far = run()
    slow = replace(LIMITS, flops={"float32": 3e10})
    assert not found_in(case(run(slow=3)))  # three times is near enough
    assert not found_in(case(far, limits=slow))
    assert not found_in(case(far, limits=None))
    assert not found_in(Case(far, StepFacts(), LIMITS))
    assert not found_in(case(far, settings={"anomaly": True}))
    assert not found_in(case(run(overhead=2.0)))
    assert not found_in(case(far, places=(place("h.0"), place("h.1"))))
    assert found_in(case(far, places=(place("h.0", supported=False, calls=()), place("h.1", idle="too small"))))
    assert not found_in(case(run(optimizer=10_000 * MS)))  # a small part of the step


def test_a_busy_machine_is_no_reason() -> None:
    calls = [replace(WIDE, layer="h.0"), replace(WIDE, layer="h.1"), PLAIN]  # nothing comes near its limit
    assert not found_in(case(run(), calls))


def test_a_gpu_that_was_idle_is_no_reason() -> None:
    cuda = {"device": "cuda", "device_name": "GPU"}
    data = run(environment=cuda)
    assert found_in(case(data))
    idle = replace(data, layers=tuple(replace(row, idle_ns=row.backward_self_ns) for row in data.layers))
    assert not found_in(case(idle))


def test_a_real_run_near_its_limit_has_no_finding() -> None:
    seen = case_of(Net(), torch.randn(32, 16, 64), memory=False)
    slow = Limits("cpu", {"float32": 1e6}, 1e6, 1000.0)
    assert not found_in(replace(seen, limits=slow))


class Passes(nn.Module):
    """One product, and many passes over what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for _ in range(10):
            h = torch.nn.functional.gelu(h)
        return h.sum()


def test_a_real_run_far_from_its_limit_has_one() -> None:
    """At a rate that the product of this very run reached, and a bandwidth that nothing on a CPU reaches."""
    seen = case_of(Passes(), torch.randn(64, 32, 64), memory=False)
    steady = replace(seen, run=replace(seen.run, step=replace(seen.run.step, overhead=1.0)))
    up = seen.layers["up"]
    assert up.flops is not None
    rate = up.flops / (up.forward_self_ns + up.backward_self_ns) * 1e9
    (finding,) = found_in(replace(steady, limits=Limits("cpu", {"float32": rate}, 1e12, 0.01)))
    assert finding.layers == ("",)
    assert finding.line is not None and "test_far_from_limit.py:" in finding.line
    assert "Passes: " in finding.evidence and "its memory traffic" in finding.evidence
    assert finding.code == "model.compile()"


def test_the_rule_says_what_it_is() -> None:
    assert RULE.title == "layers far slower than this machine's limits"
    for word in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"):
        assert word in RULE.about
