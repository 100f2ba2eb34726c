"""Where a pattern begins and ends: casts around it, operands of other dtypes, and what a vector of it is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches
from gradscope.patching.plan import Plan
from tests.patching import spelled
from tests.patching.exactness import TOLERANCE, difference, results

WIDTH = spelled.WIDTH
GELU = "0.5 * {0} * (1 + torch.erf({0} / 2**0.5))"
NORM = "{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + self.eps)"


def build(folder: Path, body: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    model = spelled.entry(folder, body, "search").build()[0].to(dtype)
    return model, torch.randn(2, 5, WIDTH, dtype=dtype)


def planned(folder: Path, body: str, dtype: torch.dtype = torch.float32) -> Plan:
    return gradscope.plan(*build(folder, body, dtype))


def reasons(found: Plan) -> list[str]:
    assert not found.supported
    return [reason for site in found.sites for reason in site.reasons]


def assert_exact(model: nn.Module, batch: Tensor, recipe: str) -> None:
    """It is found, once, and changes nothing."""
    original = copy.deepcopy(model)
    found = gradscope.plan(model, batch)
    assert [site.recipe for site in found.supported] == [recipe]
    patches = Patches(found)
    patches.apply()
    assert difference(results(original, batch), results(model, batch)) <= TOLERANCE
    patches.revert()


WIDER = {
    "read as a cast and as it is": f"h = x.float()\ny = x + ({GELU.format('x')} * (h / h)).sum()",
    "a number of float32": "h = x.float()\ny = x + (0.5 * h * (1 + torch.erf(x / 2**0.5))).sum()",
}


@pytest.mark.parametrize("body", WIDER.values(), ids=WIDER)
def test_a_result_that_is_wider_than_its_operand_is_refused(tmp_path: Path, body: str) -> None:
    found = planned(tmp_path, body, torch.bfloat16)
    assert "the result's dtype differs from the input's" in reasons(found)


def test_dropout_that_drops_by_a_tensor_is_seen_in_evaluation(tmp_path: Path) -> None:
    """What it gives then is what it was given: which of the two is meant another time is not known."""
    body = f"h = F.dropout(x, torch.tensor(0.1), self.training)\ny = {GELU.format('h')}"
    model, batch = build(tmp_path, body)
    assert any("before and after dropout" in reason for reason in reasons(gradscope.plan(model.eval(), batch)))


CAST = {
    "cast to more after it": f"y = x + ({GELU.format('x')}).double().sum()",
    "cast to less after it": f"y = x + ({GELU.format('x')}).half().float()",
    "cast twice before it": "h, g = x.double(), x.double()\n"
    "y = x + (0.5 * h * (1 + torch.erf(g / 2**0.5))).half().sum()",
    "rounded before, and cast to more": f"h = x.bfloat16().float()\ny = x + ({GELU.format('h')}).bfloat16().sum()",
}


@pytest.mark.parametrize("body", CAST.values(), ids=CAST)
def test_a_cast_around_a_pattern_is_left_to_the_code(tmp_path: Path, body: str) -> None:
    assert_exact(*build(tmp_path, body), "gelu")


def test_a_tensor_that_only_says_a_dtype_is_not_looked_behind(tmp_path: Path) -> None:
    vectors = "s = u * self.w + self.b + self.up.bias * self.inp.bias - self.out.bias\n"
    body = f"{vectors}h = x.double().type_as(s)\ny = {NORM.format('h')} * self.w + s"
    assert_exact(*build(tmp_path, body), "rms_norm")


@pytest.mark.parametrize(
    "body",
    [
        "k = (x * 9).detach().long()\ny = x + 0.5 * k * (1 + torch.erf(k / 2**0.5))",
        "k = (x * 9).detach().long()\ny = x + F.silu(u) * k",
    ],
    ids=["gelu", "swiglu"],
)
def test_whole_numbers_are_no_operand(tmp_path: Path, body: str) -> None:
    assert not planned(tmp_path, body).sites


@pytest.mark.parametrize("body", [f"{NORM.format('x')} * self.c", "F.gelu(x + self.c)"], ids=["a weight", "a bias"])
def test_a_buffer_is_another_form_later(tmp_path: Path, body: str) -> None:
    model, batch = build(tmp_path, body)
    model.register_buffer("c", torch.rand(WIDTH) + 0.5)
    original = copy.deepcopy(model)
    patches = Patches(gradscope.plan(model, batch))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    model.c = original.c = torch.rand(5, WIDTH) + 0.5
    assert difference(results(original, batch), results(model, batch)) <= TOLERANCE
    patches.revert()
