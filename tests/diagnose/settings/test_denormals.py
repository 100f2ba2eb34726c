"""The rule about denormal numbers: told where they are many and cost time, with its line, and else not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.capture import denormals
from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.diagnose.run_case import case_of
from tests.diagnose.settings.test_settings_made import call, made_case, tensor
from tests.diagnose.timing_cases import MS, check_words

RULE = RULES["denormals"]
SEEN = {
    "operand": (2048, 50257),
    "share": 0.92,
    "calls": 2,
    "ns": 32 * MS,
    "kept_ns": 16 * MS,
    "flushed_ns": MS // 2,
}
HEAD = call(
    "linear",
    [tensor(2, 1024, 768, device="cpu"), tensor(50257, 768, device="cpu", parameter="head.weight")],
    tensor(2, 1024, 50257, device="cpu"),
    layer="head",
)
SIZE = 256


class Faint(nn.Module):
    """A product whose gradients are as large as ``scale`` says."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(SIZE, SIZE), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale


def _found(seen: dict[str, Any] | None = None, **settings: Any) -> list[Finding]:
    return list(RULE.find(made_case(calls=[HEAD], device="cpu", denormals=[{**SEEN, **(seen or {})}], **settings)))


def _really(scale: float) -> tuple[Case, list[Finding]]:
    case = case_of(Faint(scale), torch.randn(SIZE, SIZE), loss=lambda result, batch: result.sum())
    return case, list(RULE.find(case))


@pytest.fixture
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes 32 times as long with denormal numbers, whatever this machine does."""
    monkeypatch.setattr(denormals, "both_ways_ns", lambda first, second: (32_000, 1_000))


@pytest.fixture
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_says_how_many_there_are_and_what_they_cost() -> None:
    (finding,) = _found()
    check_words(finding)
    assert (finding.line, finding.layers, finding.code) == ("model.py:7", ("head",), "torch.set_flush_denormal(True)")
    assert finding.evidence.startswith(
        "92.0 % of the elements of a 2048x50257 operand are below 1.2e-38; 2 matmuls in backward"
    )
    assert "32.0 ms per step (32.0 %)" in finding.evidence
    assert finding.evidence.endswith("run alone, took 16.0 ms, and 500 µs with denormals flushed")
    # Flushing left a 32nd of the part: 31 ms of the 32 would go.
    assert (finding.predicted_low_ns, finding.predicted_saving_ns, finding.predicted_high_ns) == (
        15_500_000,
        27_900_000,
        31 * MS,
    )
    assert finding.cost_ns == 32 * MS


def test_turned_around_the_gradient_is_the_same() -> None:
    (finding,) = _found({"operand": (50257, 2048)})
    assert finding.line == "model.py:7"


def test_an_operand_of_no_known_product_has_no_line() -> None:
    (finding,) = _found({"operand": (64, 50257)})
    assert (finding.line, finding.layers) == (None, ())


@pytest.mark.parametrize(
    "seen", [{"flushed_ns": 16 * MS}, {"flushed_ns": 9 * MS}, {"kept_ns": 0, "flushed_ns": 0}], ids=str
)
def test_a_processor_that_is_no_slower_by_them(seen: dict[str, Any]) -> None:
    assert _found(seen) == []


def test_what_is_flushed_already_is_left_alone() -> None:
    assert _found(flush_denormal=True) == []
    assert len(_found(flush_denormal=False)) == 1


@pytest.mark.usefixtures("slow_processor")
def test_gradients_of_a_model_are_found_with_their_line() -> None:
    case, (finding,) = _really(1e-40)
    assert finding.layers == ("head",)
    assert finding.line is not None and case.lines[finding.line].text == "return self.head(x) * self.scale"
    assert finding.evidence.startswith("100.0 % of the elements of a 256x256 operand")


@pytest.mark.usefixtures("slow_processor")
@pytest.mark.parametrize("scale", [1.0, 1e-36, 0.0])
def test_gradients_that_are_normal_or_zero_are_none(scale: float) -> None:
    case, findings = _really(scale)
    assert findings == [] and case.facts.settings["denormals"] == []


@pytest.mark.usefixtures("slow_processor", "flushed")
def test_the_advice_is_followed() -> None:
    case, findings = _really(1e-40)
    assert findings == [] and case.facts.settings["flush_denormal"] is True


@pytest.mark.usefixtures("slow_processor")
def test_few_are_no_matter() -> None:
    """One row in 256 has them: less than a hundredth."""
    few = torch.ones(SIZE, 1)
    few[7] = 1e-40
    case = case_of(Faint(1.0), torch.ones(SIZE, SIZE), loss=lambda result, batch: (result * few).sum())
    assert case.facts.settings["denormals"] == [] == list(RULE.find(case))


SCRIPT = """
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 4096)

    def forward(self, x):
        return self.head(self.body(x))

model = Classifier()
x, y = torch.randn(128, 64), torch.zeros(128, dtype=torch.long)
with torch.no_grad():
    model.head.weight.mul_(1e-3)
    model.head.bias.copy_(-torch.linspace(88, 100, 4096))  # probabilities of e-88 to e-100: below any normal number
    model.head.bias[0] = 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(40):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("slow_processor")
def test_a_softmax_over_many_classes_is_told_by_the_command(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training script as its author wrote it, whose probabilities have become denormal."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    result = run("profile", "train.py", "--json", "-", "--no-html", "--steps", "3", "--quiet")
    assert result.code == 0, result.err
    (finding,) = [each for each in json.loads(result.out)["findings"] if each["rule"] == "denormals"]
    assert finding["layers"] == ["head"] and finding["line"] == "train.py:11"
    assert finding["code"] == "torch.set_flush_denormal(True)"


@pytest.mark.usefixtures("slow_processor")
def test_a_container_of_torchs_stands_where_the_script_calls_it(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code of the user's lies between the model's call and the layers'."""
    text = SCRIPT.replace("model = Classifier()", "model = nn.Sequential()").replace("model.head", "model[1]")
    text = text.replace("nn.Sequential()", "nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096))")
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = run("profile", "train.py", "--json", "-", "--no-html", "--steps", "3", "--quiet")
    assert result.code == 0, result.err
    (finding,) = [each for each in json.loads(result.out)["findings"] if each["rule"] == "denormals"]
    assert (finding["layers"], finding["line"]) == ([""], "train.py:22")
