"""The rules about time, each on a bad and a good twin that really run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.diagnose.rules import RULES
from gradscope.diagnose.rules.layers import backward_ratio, slow_repeat, tiny_layers, vocabulary_multiple
from gradscope.diagnose.rules.loop import data_loading, host_sync, unused_gradients
from gradscope.tables import Finding
from tests.diagnose.corpus import BY_CALLS, BY_OPERATIONS
from tests.diagnose.run_case import Twin, case_of, findings_of, timed_by_calls
from tests.diagnose.timing_cases import check_words, made_case
from tests.diagnose.twins_timing import TWINS, Recurrent

MINE = (backward_ratio, data_loading, host_sync, slow_repeat, tiny_layers, unused_gradients, vocabulary_multiple)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make any time of a small operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _found(findings: Sequence[Finding], rule: str) -> list[Finding]:
    return [finding for finding in findings if finding.rule == rule]


def _findings(rule: str, workload: dict[str, Any]) -> list[Finding]:
    """Of one rule; where it judges what calls or operations take, each takes the same."""
    return _found(findings_of(**workload, by_calls=BY_CALLS & {rule}, by_operations=BY_OPERATIONS & {rule}), rule)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_bad_twin_is_told_of_and_the_good_one_is_not(twin: Twin) -> None:
    bad = _findings(twin.rule, twin.bad())
    assert len(bad) == 1
    check_words(bad[0])
    assert not _findings(twin.rule, twin.good())


def test_every_rule_is_known_and_explains_itself() -> None:
    for module in MINE:
        rule = RULES[module.RULE.name]
        for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"):
            assert part in rule.about, (rule.name, part)


@pytest.mark.parametrize("module", MINE, ids=lambda module: module.RULE.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_known_is_nothing_found(module: Any, device: str) -> None:
    assert list(module.find(made_case(device=device))) == []
    assert list(module.find(made_case(wall=0, forward=0, backward=0, device=device))) == []


def _real(name: str) -> list[Finding]:
    twin = next(twin for twin in TWINS if twin.name == name)
    return _findings(twin.rule, twin.bad())


def test_a_backward_by_hand_is_named() -> None:
    (found,) = _real("backward by hand")
    assert "SlowTanh" in found.message
    assert found.severity == "critical"
    assert found.line is not None


def test_the_block_that_does_more_is_named_with_its_operation() -> None:
    (found,) = _real("one block does more")
    assert found.layers == ("blocks.3",)
    assert "aten::" in found.message
    assert "4 other blocks" in found.message
    (hooked,) = _real("a hook left on one block")
    assert hooked.layers == ("blocks.2",)
    assert "aten::sort" in hooked.message


def test_a_recurrence_is_not_told_to_run_all_turns_at_once() -> None:
    (recurrent,) = _real("recurrence by hand")
    assert "nn.LSTM" in recurrent.advice
    assert "24 iterations" in recurrent.evidence
    (heads,) = _real("heads one by one")
    assert "batched matmul" in heads.advice
    assert "32 iterations" in heads.evidence


def test_a_stack_of_small_layers_is_no_loop() -> None:
    layers = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    found = findings_of(nn.Sequential(*layers), torch.randn(4, 8), memory=False)
    assert not _found(found, "tiny-layers")


def test_the_head_is_padded_to_the_next_multiple() -> None:
    (found,) = _real("odd vocabulary")
    assert "10,048" in found.advice
    assert found.predicted_saving_ns is not None


def test_what_is_not_trained_is_frozen() -> None:
    (unused,) = _real("head that is never used")
    assert unused.layers == ("old",)
    assert unused.code == "model.get_submodule('old').requires_grad_(False)"
    (wasted,) = _real("head that is not trained")
    assert wasted.layers == ("old",)
    assert wasted.predicted_saving_bytes == (64 * 2048 + 2048) * 4


def test_a_loop_that_waits_for_its_data() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def found(pause: float) -> list[Finding]:
        with gradscope.profiling(model, steps=2, warmup=1, memory=False) as prof:
            for _ in range(50):
                time.sleep(pause)
                model(torch.randn(2048, 32)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if prof.step():
                    break
        return _found(prof.report.data.findings, "data-loading")

    (told,) = found(0.02)
    check_words(told)


def test_a_loop_of_large_operations_is_no_loop_of_tiny_ones() -> None:
    case = timed_by_calls(case_of(Recurrent(), torch.randn(4, 24, 16), memory=False))
    assert len(list(tiny_layers.find(case))) == 1
    large = [
        replace(call, outputs=tuple(replace(each, shape=(400, 400)) for each in call.outputs))
        for call in case.facts.calls
    ]
    assert list(tiny_layers.find(replace(case, facts=replace(case.facts, calls=tuple(large))))) == []


def test_calls_that_take_long_or_little_of_the_step_are_no_finding() -> None:
    case = case_of(Recurrent(), torch.randn(4, 24, 16), memory=False)
    (found,) = tiny_layers.find(timed_by_calls(case, 90_000))
    assert "90.0 µs per call including backward" in found.evidence
    assert list(tiny_layers.find(timed_by_calls(case, 110_000))) == []
    whole = timed_by_calls(case).step_ns
    assert len(list(tiny_layers.find(timed_by_calls(case, rest_ns=whole)))) == 1
    assert list(tiny_layers.find(timed_by_calls(case, rest_ns=20 * whole))) == []


def test_a_call_of_one_turn_does_not_count_for_the_loop() -> None:
    """On the line of the loop, but made once: the turns, and the estimate's range, are those of the loop."""

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = [(self.linear(one) * 2 - 1 if i else self.linear(one).exp()) for i, one in enumerate(x.unbind())]
            return torch.stack(found)

    (finding,) = tiny_layers.find(timed_by_calls(case_of(States(), torch.ones(96, 2, 8))))
    assert "1 turns" not in finding.evidence
    low, saving, high = finding.predicted_low_ns, finding.predicted_saving_ns, finding.predicted_high_ns
    assert low is not None and saving is not None and high is not None
    assert low <= saving <= high
