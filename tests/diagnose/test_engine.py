"""How rules are run: order, what is left out, what happens when one fails, and which step they look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import gradscope
from gradscope.diagnose import engine
from gradscope.diagnose.case import Case, Rule, StepFacts, severity_of
from gradscope.diagnose.engine import diagnose, every_rule, require_known
from gradscope.diagnose.rules import RULES
from gradscope.errors import UsageError
from gradscope.patching import places as found_places
from gradscope.recording.record import Recorder
from gradscope.tables import Finding
from tests.diagnose.run_case import case_of, findings_of
from tests.diagnose.timing_cases import MS, made_case, row


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


def attention() -> dict[str, object]:
    return {"model": nn.Sequential(Attention(), Attention()), "batch": torch.randn(8, 128, 64)}


def one(rule: str, saving: int | None, severity: str = "info") -> Finding:
    return Finding(rule, severity, (), None, "m", "e", predicted_saving_ns=saving)  # type: ignore[arg-type]


def with_rules(monkeypatch: pytest.MonkeyPatch, *rules: Rule) -> None:
    monkeypatch.setattr(engine, "RULES", {rule.name: rule for rule in rules})


def test_the_largest_saving_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = priced_case()
    found = [one("a", 5 * MS), one("a", None, "warning"), one("b", 50 * MS), one("c", None)]
    with_rules(monkeypatch, Rule("a", "", lambda case: iter(found)))
    said = [(each.rule, each.severity) for each in diagnose(case)[0]]
    assert said == [("b", "critical"), ("a", "warning"), ("a", "warning"), ("c", "info")]


def test_a_rule_that_fails_costs_its_own_findings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: Case) -> Iterator[Finding]:
        yield one("a", 10 * MS)
        raise ZeroDivisionError("of nothing")

    with_rules(monkeypatch, Rule("a", "", failing), Rule("b", "", lambda case: iter([one("b", 20 * MS)])))
    found, notes = diagnose(priced_case())
    assert [each.rule for each in found] == ["b"]
    assert notes == ["rule a failed, so it reports nothing: ZeroDivisionError: of nothing"]


def priced_case() -> Case:
    """Of a step of 100 ms."""
    return made_case([row("body", 20 * MS, 30 * MS)])


def plain_case() -> Case:
    return case_of(nn.Linear(4, 4), torch.ones(2, 4), memory=False)


def test_ignored_rules_are_not_run_and_unknown_ones_an_error() -> None:
    case = case_of(**attention())  # type: ignore[arg-type]
    assert "attention-by-hand" in {each.rule for each in diagnose(case)[0]}
    assert "attention-by-hand" not in {each.rule for each in diagnose(case, ["attention-by-hand"])[0]}
    with pytest.raises(UsageError, match="there is no rule 'attention'; gradscope rules lists them"):
        require_known(["attention"])


def test_nothing_is_found_where_nothing_is_known() -> None:
    """No recorded step, no memory, no time: every rule copes."""
    case = plain_case()
    empty = replace(case.run, layers=[replace(row, bytes=None, bound_by=None) for row in case.run.layers], memory=None)
    for run in (case.run, empty):
        assert diagnose(Case(run, StepFacts()))[1] == []


def test_every_rule_says_what_it_is() -> None:
    for rule in every_rule():
        assert rule.title and len(rule.title) < 100 and not rule.title.endswith(".")
        for word in ("Example", "Pattern", "Evidence", "Estimate", "Source"):
            assert word in rule.about, f"{rule.name} says no {word}"


def test_severity_is_the_share_of_the_step() -> None:
    case = plain_case()
    step = case.step_ns
    shares = [severity_of(part, case) for part in (None, step // 100, step // 25, step // 5)]
    assert shares == ["info", "info", "warning", "critical"]


@pytest.mark.parametrize("memory", [True, False])
def test_repeated_blocks_are_one_finding(memory: bool) -> None:
    found = [each for each in findings_of(**attention(), memory=memory) if each.rule == "attention-by-hand"]  # type: ignore[arg-type]
    assert [list(each.layers) for each in found] == [["0", "1"]]
    assert found[0].line is not None and found[0].line.startswith("tests/diagnose/test_engine.py:")


def test_in_a_loop_of_ones_own() -> None:
    given = attention()
    model, batch = given["model"], given["batch"]
    assert isinstance(model, nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(40):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if prof.step():
                break
    assert "attention-by-hand" in {each.rule for each in prof.report.data.findings}


def test_a_step_of_too_many_calls_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "MOST_CALLS", 5)
    given = attention()
    report = gradscope.profile(given["model"], given["batch"], steps=1, warmup=1)  # type: ignore[arg-type]
    assert "rules that need the recorded torch calls were skipped: the step makes more than 5" in report.data.notes
    assert "attention-by-hand" not in {each.rule for each in report.data.findings}


def test_names_are_kebab_case_and_of_their_files() -> None:
    for name, rule in RULES.items():
        assert name == rule.name and name == name.lower() and "_" not in name


@pytest.mark.micro_runs
def test_savings_come_from_runs_at_the_users_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)  # however long the step took
    places = case_of(**attention()).facts.places  # type: ignore[arg-type]
    assert [place.recipe for place in places] == ["packed_attention"] * 2
    assert places[0].predicted_saving_ns is not None
    assert places[0].predicted_saving_ns == places[1].predicted_saving_ns  # the same work is run once
