"""Dropout of attention by seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradscope.kernels.attention.dropout import keep_mask
from gradscope.recipes.attention import Attention, attention

from .attention_cases import ours, qkv


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**61 + 7])
def test_what_is_kept_is_independent(p: float, seed: int) -> None:
    """Edge case 14. The share, neighbours in every direction, quadruples, other seeds: within five deviations."""
    kept = keep_mask(torch.tensor([seed]), (2, 3, 160, 200), p).double()
    other = keep_mask(torch.tensor([seed + 1]), (2, 3, 160, 200), p).double()
    z, y = ((x - (1 - p)) / math.sqrt(p * (1 - p)) for x in (kept, other))
    products = {
        "share": z,
        "next key": z[..., 1:] * z[..., :-1],
        "eight keys on": z[..., 8:] * z[..., :-8],
        "next query": z[..., 1:, :] * z[..., :-1, :],
        "diagonal": z[..., 1:, 1:] * z[..., :-1, :-1],
        "next head": z[:, 1:] * z[:, :-1],
        "next sample": z[1:] * z[:-1],
        "quadruple": z[..., 1:, 1:] * z[..., :-1, 1:] * z[..., 1:, :-1] * z[..., :-1, :-1],
        "next seed": z * y,
    }
    for name, product in products.items():
        deviations = product.sum().item() / math.sqrt(product.numel())
        assert abs(deviations) < 5, name


def test_the_mean_over_seeds_is_attention_without_dropout() -> None:
    """Edge case 14: what is kept is rescaled."""
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    whole = attention(q, k, v)
    runs = torch.stack([ours(q, k, v, dropout_p=0.3) for _ in range(2000)])
    error = (runs.mean(0) - whole).abs() / (runs.std(0) / math.sqrt(len(runs)))
    assert error.max() < 5  # standard errors, of 96 values


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_a_seed_a_call(backend: str) -> None:
    """Edge case 14."""
    q, k, v = qkv(1, 2, 2, 8, 8, 4)
    one, other = (attention(q, k, v, dropout_p=0.5, backend=backend) for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_the_same_in_recompute(backend: str) -> None:
    """Edge case 14: checkpointing puts the generator back, and the seed is drawn from it."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 40, 40, 4)]

    def attend(*args: torch.Tensor) -> torch.Tensor:
        return attention(*args, dropout_p=0.5, backend=backend)

    torch.manual_seed(5)
    plain = attend(*tensors)
    expected = torch.autograd.grad(plain.square().sum(), tensors)
    torch.manual_seed(5)
    out = checkpoint(attend, *tensors, use_reentrant=False)
    assert torch.equal(out, plain)
    for one, other in zip(torch.autograd.grad(out.square().sum(), tensors), expected, strict=True):
        assert torch.equal(one, other)


def test_off_in_eval_and_at_zero() -> None:
    """Edge case 14; and nothing is drawn from the generator then."""
    q, k, v = qkv(1, 2, 2, 8, 8, 4)
    whole = attention(q, k, v, is_causal=True)
    module = Attention(0.5, is_causal=True)
    before = torch.get_rng_state()
    assert torch.equal(module.eval()(q, k, v), whole)
    assert torch.equal(attention(q, k, v, dropout_p=0.0, is_causal=True), whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(module.train()(q, k, v), whole)


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_all_dropped_is_nothing(backend: str) -> None:
    tensors = [x.requires_grad_() for x in qkv(1, 2, 2, 8, 8, 4)]
    out = attention(*tensors, dropout_p=1.0, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), tensors):
        assert torch.equal(grad, torch.zeros_like(grad))
