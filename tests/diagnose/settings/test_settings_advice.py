"""Advice that is followed: the finding is gone. And what rules about settings must not take for a problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.capture.environment import optimizer_fact
from gradscope.diagnose.case import StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding, OpRow, OptimizerFact, ParameterFact
from tests.diagnose.run_case import case_of, findings_of
from tests.diagnose.settings.test_settings_made import ADAMW, CONV, LINEAR, NCHW, STEP, TURN, made_case, tensor
from tests.diagnose.twins_settings import CastByHand, Repeated, stack


def of_rule(findings: Sequence[Finding], rule: str) -> list[Finding]:
    return [each for each in findings if each.rule == rule]


# ---------------------------------------------------------------------------------------------- unused-gradients


class Branches(nn.Module):
    """A body that is used, and branches of which some are not.

    Args:
        used: names of the branches that the loss needs.
    """

    def __init__(self, used: Sequence[str] = ("one",), branches: Sequence[str] = ("one", "two", "three")) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.used = nn.Linear(16, 16), used
        self.branches = nn.ModuleDict({name: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)) for name in branches})
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x) * self.scale
        return sum((self.branches[name](y).mean() for name in self.used), torch.zeros(()))


def after(model: nn.Module, code: str, **names: Any) -> None:
    """Run a finding's line."""
    exec(code, {"model": model, "torch": torch, **names})


def unused(model: nn.Module) -> list[Finding]:
    return of_rule(findings_of(model, torch.ones(4, 16)), "unused-gradients")


def trained(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("many", [False, True])
def test_what_is_frozen_is_what_nothing_uses(many: bool) -> None:
    names = [f"b{i}" for i in range(12)] if many else ["one", "two", "three"]
    model = Branches(used=names[::2], branches=names)
    (finding,) = unused(model)
    used = {f"branches.{name}." for name in model.used}
    wanted = {
        name
        for name in trained(model) - {"shift"}
        if not name.startswith("branches.") or any(name.startswith(each) for each in used)
    }
    model(torch.ones(4, 16)).backward()
    after(model, finding.code)
    assert trained(model) == wanted
    model.zero_grad()
    assert unused(model) == []


def test_one_module_that_nothing_uses_is_named_whole() -> None:
    model = Branches(used=("one", "two"))
    del model.shift
    (finding,) = unused(model)
    assert finding.code == "model.get_submodule('branches.three').requires_grad_(False)"
    assert finding.advice.startswith("Freeze parameters that are not trained, such as a target network")


def test_gradients_without_an_optimizer_are_frozen_by_the_code() -> None:
    model = Branches(used=("one", "two", "three"))
    del model.shift
    head = [*model.branches["one"].parameters(), *model.branches["two"].parameters(), model.scale]
    optimizer = torch.optim.SGD(head, lr=0.1)
    (finding,) = of_rule(findings_of(model, torch.ones(4, 16), optimizer=optimizer), "unused-gradients")
    assert "no optimizer uses" in finding.message
    after(model, finding.code, optimizer=optimizer)
    assert trained(model) == {name for name, each in model.named_parameters() if any(each is one for one in head)}
    assert of_rule(findings_of(model, torch.ones(4, 16), optimizer=optimizer), "unused-gradients") == []


def test_an_optimizer_of_copies_says_nothing() -> None:
    parameters = [
        ParameterFact("a.weight", "a", (4, 4), "float16", "cuda", True, True, optimized) for optimized in (False,)
    ]
    case = made_case(optimizers=[ADAMW])
    assert list(RULES["unused-gradients"].find(replace(case, facts=replace(case.facts, parameters=parameters)))) == []


# ---------------------------------------------------------------------------------------------- optimizer-unfused


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad"])
def test_the_fused_optimizer_is_what_the_code_makes(kind: str) -> None:
    model = stack(20, 64)
    (finding,) = RULES["optimizer-unfused"].find(
        made_case([STEP], [LINEAR], optimizers=[OptimizerFact(kind, None, None, 40, 1)], device="cpu")
    )
    names: dict[str, Any] = {"lr": 1e-3}
    exec(finding.code, {"model": model, "torch": torch}, names)
    optimizer = names["optimizer"]
    assert type(optimizer) is getattr(torch.optim, kind) and optimizer_fact(optimizer).fused is True
    findings = findings_of(model, torch.ones(8, 64), optimizer=optimizer)
    assert of_rule(findings, "optimizer-unfused") == []


def test_every_class_with_a_fused_variant_is_known() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    fused = {kind.__name__ for kind in kinds if "fused" in inspect.signature(kind.__init__).parameters}
    assert fused == {"Adagrad", "Adam", "AdamW", "SGD"}


def test_groups_may_be_fused_on_their_own() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": one.parameters(), "fused": True}, {"params": other.parameters()}]
    assert optimizer_fact(torch.optim.AdamW(groups)).fused is False
    assert optimizer_fact(torch.optim.AdamW([groups[0] | {"params": one.parameters()}])).fused is True
    assert optimizer_fact(torch.optim.AdamW(one.parameters())).fused is None
    assert optimizer_fact(torch.optim.AdamW(one.parameters(), foreach=True)).foreach is True


def test_an_optimizer_holds_the_tensors_of_all_its_groups() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(5, 7, bias=False)
    fact = optimizer_fact(torch.optim.SGD([{"params": one.parameters()}, {"params": other.parameters()}]))
    assert (fact.class_name, fact.tensors, fact.elements) == ("SGD", 3, 2 * 3 + 3 + 5 * 7)


def test_foreach_and_fused_exclude_each_other() -> None:
    (finding,) = RULES["optimizer-unfused"].find(made_case([STEP], optimizers=[replace(ADAMW, foreach=True)]))
    assert finding.advice == "Replace `foreach=True` by `fused=True`."


def test_classes_of_others_are_not_torchs() -> None:
    class AdamW(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1.0})

    fact = optimizer_fact(AdamW(nn.Linear(2, 2).parameters()))
    assert fact.class_name.endswith(".AdamW") and fact.fused is None
    assert list(RULES["optimizer-unfused"].find(made_case([STEP], optimizers=[fact]))) == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_not_fused(bag: bool) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(100, 64, sparse=True) if bag else nn.Embedding(100, 64, sparse=True)
            self.body = stack(20, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.table(x)).mean()

    model = Lookup()
    batch = torch.zeros(8, 4, dtype=torch.long)
    case = case_of(model, batch, optimizer=torch.optim.Adagrad(model.parameters()))
    assert list(RULES["optimizer-unfused"].find(case)) == []
    assert list(RULES["optimizer-unfused"].find(replace(case, facts=StepFacts(optimizers=case.facts.optimizers)))) == []


def test_adagrad_on_cuda_is_left_alone() -> None:
    adagrad = replace(ADAMW, class_name="Adagrad")
    assert list(RULES["optimizer-unfused"].find(made_case([STEP], [LINEAR], optimizers=[adagrad]))) == []


# ---------------------------------------------------------------------------------------------- autocast-casts


def accumulating(model: nn.Module, rounds: int) -> list[Finding]:
    """Gradients of several batches in one step, with an autocast for each."""
    batch = torch.ones(8, 256)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            for _ in range(rounds):
                model(batch).backward()
            if prof.step():
                break
    return of_rule(prof.report.data.findings, "autocast-casts")


def test_each_backward_pass_needs_a_cast_of_its_own() -> None:
    assert accumulating(Repeated(cache=True), 4) == []
    assert accumulating(Repeated(times=1, cache=False), 4) == []
    (finding,) = accumulating(Repeated(times=3, cache=False), 4)
    assert finding.evidence.startswith("24 weight casts per step where 8 are enough")


def test_weights_that_the_code_casts_again() -> None:
    (finding,) = of_rule(findings_of(CastByHand(often=True), torch.ones(8, 256)), "autocast-casts")
    assert finding.message == "The same float32 weights are cast again at every use"
    assert finding.evidence.startswith("7 weight casts per step where 1 are enough")
    assert finding.line is not None
    with open(finding.line.rpartition(":")[0]) as file:  # of the two, the one in the loop
        assert "if self.often" in file.read().splitlines()[int(finding.line.rpartition(":")[2]) - 1]
    assert of_rule(findings_of(CastByHand(often=False), torch.ones(8, 256)), "autocast-casts") == []


# ---------------------------------------------------------------------------------------------- on a GPU


def test_images_in_channels_last_are_left_alone() -> None:
    (finding,) = RULES["channels-last"].find(made_case(calls=[CONV], kernels=[TURN]))
    names: dict[str, Any] = {"torch": torch, "model": nn.Conv2d(16, 16, 3)}
    exec(finding.code, names)
    images = torch.ones(8, 16, 32, 32).to(memory_format=torch.channels_last)
    turned = tensor(*NCHW.shape, strides=images.stride())
    assert names["model"].weight.is_contiguous(memory_format=torch.channels_last)
    after_advice = replace(CONV, inputs=(turned, CONV.inputs[1]))
    assert list(RULES["channels-last"].find(made_case(calls=[after_advice], kernels=[TURN]))) == []


@pytest.mark.parametrize("name", ["aten::embedding_dense_backward", "aten::cumsum", "aten::put_"])
def test_what_has_no_deterministic_variant_is_not_slower_by_it(name: str) -> None:
    case = made_case([OpRow("body", "backward", name, 2, 20_000_000)], deterministic=True)
    assert list(RULES["deterministic-mode"].find(case)) == []


def test_attention_has_a_deterministic_backward() -> None:
    row = OpRow("body", "backward", "aten::_flash_attention_backward", 2, 20_000_000)
    (finding,) = RULES["deterministic-mode"].find(made_case([row], deterministic=True))
    names: dict[str, Callable[..., Any]] = {}
    exec(finding.code, {"torch": torch}, names)
    assert not torch.are_deterministic_algorithms_enabled()
    assert list(RULES["deterministic-mode"].find(made_case([row], deterministic=False))) == []
