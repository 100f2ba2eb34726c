"""The rule about masks: told only where no batch can make the mask another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests.diagnose.run_case import case_of

TOKENS = 32
_LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[nn.Module, Tensor, int], Tensor | None]


class Attention(nn.Module):
    """Torch's attention with a mask that ``mask`` makes of the module, the input and the number of tokens."""

    def __init__(self, mask: Mask, *, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.mask, self.causal = nn.Linear(16, 48), mask, causal
        whole = torch.ones(64, 64, dtype=torch.bool)
        self.register_buffer("tril", whole.tril())
        self.register_buffer("numbers", whole.tril().float()[None, None])
        self.register_buffer("window", whole.tril() & ~whole.tril(-40))  # causal as far as 40 tokens
        self.register_buffer("all", whole)
        self.register_buffer("corner", F.pad(torch.ones(40, 40), (0, 24, 0, 24)) > 0)
        self.learnt = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.project(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, x, x.shape[1]), is_causal=self.causal)
        return y.mean()


def found(case: Case, *, places: bool = True) -> list[Finding]:
    if not places:
        case = Case(case.run, replace(case.facts, places=()), case.limits)
    return list(RULES["attention-explicit-mask"].find(case))


def case_with(mask: Mask, **more: bool) -> Case:
    torch.manual_seed(1)
    return case_of(Attention(mask, **more), torch.randn(2, TOKENS, 16))


CAUSAL: dict[str, Mask] = {
    "made each step": lambda module, x, t: torch.ones(t, t, dtype=torch.bool, device=x.device).tril(),
    "made each step, added": lambda module, x, t: torch.full((t, t), _LOWEST).triu(1),
    "made each step, infinite": lambda module, x, t: torch.zeros(t, t).masked_fill(
        torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf
    ),
    "for each of the batch": lambda module, x, t: torch.full((t, t), _LOWEST).triu(1)[None, None].expand(2, 1, t, t),
    "of positions": lambda module, x, t: torch.arange(t)[:, None] >= torch.arange(t)[None],
    "a buffer's part": lambda module, x, t: module.tril[:t, :t],
    "a buffer's part, of numbers": lambda module, x, t: module.numbers[:, :, :t, :t] != 0,
}
OPEN: dict[str, Mask] = {
    "all true": lambda module, x, t: torch.ones(t, t, dtype=torch.bool),
    "all zeros": lambda module, x, t: x.new_zeros(1, 1, t, t).expand(2, 1, t, t),
    "a buffer's part": lambda module, x, t: module.all[None, None, :t, :t],
}
OTHERS: dict[str, Mask] = {
    "none": lambda module, x, t: None,
    "a window": lambda module, x, t: module.tril[:t, :t] & ~module.tril[:t, :t].tril(-4),
    "part of a larger true corner": lambda module, x, t: module.corner[:t, :t],
    "learnt, and zero at first": lambda module, x, t: module.learnt[:t, :t],
    "of the batch, and nothing padded": lambda module, x, t: (x.abs().sum(-1) >= 0)[:, None, None, :].expand(
        2, 1, t, t
    ),
    "of the batch, added": lambda module, x, t: (x.abs().sum(-1) < 0)[:, None, None, :].float() * _LOWEST,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_that_no_batch_changes(name: str) -> None:
    case = case_with(CAUSAL[name])
    assert [call.mask for call in case.facts.calls if "dot_product" in call.op] == ["causal"]
    (finding,) = found(case, places=False)
    assert finding.advice == "Pass `is_causal=True` instead of the mask."
    assert finding.code == "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    assert " mask in " in finding.evidence and finding.line is not None and finding.line.startswith("tests/")
    (finding,) = found(case)
    assert finding.advice.startswith("Pass `is_causal=True` instead of the mask")
    assert finding.advice.count("mask") == 1 or "which checks the mask in every step" in finding.advice


@pytest.mark.parametrize("name", OPEN)
def test_a_mask_that_hides_nothing(name: str) -> None:
    (finding,) = found(case_with(OPEN[name]))
    assert finding.message == "Attention gets a mask that masks nothing, but it is still read for every score"
    assert finding.code == "y = F.scaled_dot_product_attention(q, k, v)"
    assert (finding.predicted_low_ns or 0) <= (finding.predicted_saving_ns or 0) <= (finding.predicted_high_ns or 0)


@pytest.mark.parametrize("name", OTHERS)
def test_masks_that_are_left_alone(name: str) -> None:
    assert found(case_with(OTHERS[name])) == []


def test_a_buffer_of_a_window_is_causal_only_here() -> None:
    case = case_with(lambda module, x, t: module.window[:t, :t])
    for finding in found(case):
        assert "in this step" in finding.message and "is_causal" not in finding.code
        assert "Remove the mask" not in finding.advice
    assert found(case, places=False) == []


def test_padding_that_this_batch_does_not_have_is_no_reason_to_leave_a_mask_out() -> None:
    def mask(module: nn.Module, x: Tensor, t: int) -> Tensor:
        return (module.get_buffer("tril")[:t, :t] & (x[:1].abs().sum(-1) >= 0)[:, None, :])[:, None]

    case = case_with(mask)
    assert found(case, places=False) == []
    assert not any("Remove the mask" in finding.advice for finding in found(case))


@pytest.mark.parametrize("mask", [CAUSAL["made each step"], CAUSAL["a buffer's part"], OPEN["all true"]])
def test_advice_followed_is_silent(mask: Mask) -> None:
    assert found(case_with(lambda module, x, t: None, causal=mask is not OPEN["all true"])) == []


def test_repeats_are_one_finding() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(OPEN["all true"]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) + self.layers[1](x)

    case = case_of(Two(), torch.randn(2, TOKENS, 16))
    (finding,) = found(case)
    assert list(finding.layers) == ["layers.0", "layers.1"]
    assert finding.evidence.startswith("a 1.02 kB mask in 2 calls")


def test_a_line_that_others_go_through_counts_by_its_part() -> None:
    def mask(module: nn.Module, x: Tensor, t: int) -> Tensor | None:
        return None if module.scale == 1 else torch.ones(t, t, dtype=torch.bool)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(mask) for _ in range(2))
            self.layers[0].scale, self.layers[1].scale = 1, 2

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) + self.layers[1](x)

    case = case_of(Two(), torch.randn(2, TOKENS, 16))
    (finding,) = found(case)
    assert list(finding.layers) == ["layers.1"] and finding.line is not None
    assert finding.predicted_high_ns == round(case.lines_ns([finding.line]) / 2 * 0.35)
