"""Attention scores in float16: where they may overflow, however the product is spelt, and where they cannot."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests.diagnose.run_case import case_of

WIDTH, TOKENS = 16, 24
Weights = Callable[[Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Attention whose weights ``weights`` makes of queries and keys of 2 heads."""

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.weights = nn.Linear(WIDTH, 3 * WIDTH).to(dtype), weights

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.project(x).chunk(3, dim=-1))
        weights = self.weights(q, k)
        return (weights.to(v.dtype) @ v).float().mean()


class Autocast(Heads):
    """The same in float32, under autocast."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return super().forward(x)


def found(model: Heads) -> list[Finding]:
    batch = torch.ones(2, TOKENS, WIDTH, dtype=model.project.weight.dtype)
    return list(RULES["float16-softmax"].find(case_of(model, batch)))


def angles(width: int = WIDTH // 2) -> Tensor:
    speeds = 1.0 / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(TOKENS).float(), speeds)


def turned(x: Tensor) -> Tensor:
    """Rotary positions of two halves."""
    both = torch.cat((angles(), angles()), -1)
    one, other = x.chunk(2, -1)
    return x * (both.cos() * 1.0).to(x.dtype) + torch.cat((-other, one), -1) * both.sin().to(x.dtype)


def turned_in_pairs(x: Tensor) -> Tensor:
    """Rotary positions of neighbours, each part on its own."""
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], angles().cos().to(x.dtype), angles().sin().to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def turned_as_complex(x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles()), angles())).flatten(-2).type_as(x)


def packed(q: Tensor) -> Tensor:
    return q.reshape(-1, q.shape[-2], q.shape[-1])


def by_baddbmm(q: Tensor, k: Tensor, *, alpha: float) -> Tensor:
    bias = q.new_zeros(4, TOKENS, TOKENS)
    scores = torch.baddbmm(bias, packed(q), packed(k).transpose(1, 2), beta=0, alpha=alpha)
    scores = scores.view(2, 2, TOKENS, TOKENS)
    return (scores / math.sqrt(8) if alpha == 1 else scores).float().softmax(-1)


def late(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))


BAD: dict[str, Weights] = {
    "softmax made float32 by its argument": lambda q, k: F.softmax(late(q, k), dim=-1, dtype=torch.float32),
    "cast before the scale": lambda q, k: ((q @ k.mT).float() * 0.35).softmax(-1),
    "all in float16": lambda q, k: late(q, k).softmax(-1),
    "einsum": lambda q, k: (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.35).float().softmax(-1),
    "bmm": lambda q, k: (torch.bmm(packed(q), packed(k).mT) * 0.35).float().softmax(-1).view(2, 2, TOKENS, TOKENS),
    "baddbmm": lambda q, k: by_baddbmm(q, k, alpha=1),
    "rotary halves": lambda q, k: late(turned(q), turned(k)).float().softmax(-1),
    "rotary pairs": lambda q, k: late(turned_in_pairs(q), turned_in_pairs(k)).float().softmax(-1),
    "rotary as complex numbers": lambda q, k: late(turned_as_complex(q), turned_as_complex(k)).float().softmax(-1),
    "keys behind an empty cache": lambda q, k: late(q, torch.cat((q.new_zeros(0), k), -2)).float().softmax(-1),
    "mask added before": lambda q, k: (torch.zeros(2, 2, TOKENS, TOKENS).half() + late(q, k)).float().softmax(-1),
}
GOOD: dict[str, Weights] = {
    "queries scaled first": lambda q, k: ((q / math.sqrt(8)) @ k.mT).float().softmax(-1),
    "both scaled": lambda q, k: ((q * 0.6) @ (k * 0.6).mT).float().softmax(-1),
    "scaled after they are turned": lambda q, k: ((turned(q) * 0.35) @ turned(k).mT).float().softmax(-1),
    "scores in float32": lambda q, k: late(q.float(), k.float()).softmax(-1),
    "alpha of baddbmm": lambda q, k: by_baddbmm(q, k, alpha=0.35),
    "normalised": lambda q, k: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 8).float().softmax(-1),
}


@pytest.mark.parametrize("name", BAD)
def test_scores_that_may_overflow(name: str) -> None:
    (finding,) = found(Heads(BAD[name]))
    assert "before scaling and may overflow" in finding.message
    assert finding.evidence.startswith("each score sums 8 products of unscaled values")
    assert finding.severity == ("info" if name == "all in float16" else "warning")


@pytest.mark.parametrize("name", GOOD)
def test_scores_that_stay_small(name: str) -> None:
    assert found(Heads(GOOD[name])) == []


@pytest.mark.parametrize("name", ["all in float16", "einsum", "rotary halves"])
def test_bfloat16_does_not_overflow(name: str) -> None:
    assert found(Heads(BAD[name], torch.bfloat16)) == []


def test_autocast_multiplies_in_float16() -> None:
    (finding,) = found(Autocast(BAD["all in float16"]))
    assert "before scaling" in finding.message
    assert found(Autocast(GOOD["queries scaled first"])) == []


def test_scores_that_nothing_scales_are_not_said_to_be() -> None:
    (finding,) = found(Heads(lambda q, k: (q @ k.mT).float().softmax(-1)))
    assert finding.message.startswith("Attention scores are computed in float16 without scaling")
    assert finding.code == "y = F.scaled_dot_product_attention(q, k, v, scale=1.0)"
    assert "queries" not in finding.advice


def test_the_overflow_is_real() -> None:
    q = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)
    assert torch.isinf(late(q, q)).all() and torch.isfinite((q / 8) @ q.mT).all()
    assert torch.isfinite(F.scaled_dot_product_attention(q, q, q)).all()
