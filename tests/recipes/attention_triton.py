"""What the tests of attention's Triton kernels share: problems, their truth, and how exact the kernels have to be."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from gradscope.kernels.attention import triton_launch
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.attention.reference import attention, masked_scores

from .accuracy import assert_as_accurate, dirty_memory

NAMES = ("out", "dq", "dk", "dv", "dbias")


@dataclass
class Problem:
    """Arguments of forward and backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    options: AttentionOptions
    bias: Tensor | None = None
    seed: Tensor | None = None

    @property
    def bias_learns(self) -> bool:
        """Check that the bias gets a gradient."""
        return self.bias is not None and self.bias.dtype != torch.bool


def problem(
    device: torch.device,
    queries: int,
    keys: int,
    size: int = 16,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    **options: object,
) -> Problem:
    """Random tensors of these shapes; ``options`` are the fields of AttentionOptions."""
    shared = kv_heads or heads
    wide = value_size or size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    settings = AttentionOptions(**{"scale": size**-0.5, "kv_heads": shared, **options})  # type: ignore[arg-type]
    return Problem(
        q=drawn(batch, heads, queries, size),
        k=drawn(batch, shared, keys, size),
        v=drawn(batch, shared, keys, wide),
        grad_out=drawn(batch, heads, queries, wide),
        options=settings,
        bias=bias if bias is None or bias.dtype == torch.bool else bias.to(device, dtype),
        seed=torch.tensor(1 << 40 | 12345, device=device) if settings.dropout_p else None,
    )


def kernels(p: Problem, repeatable: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The logsumexp, and output and gradients in the order of NAMES; in memory that was not clean.

    Args:
        repeatable: as where deterministic algorithms are asked for, which they are for dirty memory already.
    """
    with dirty_memory(), mock.patch.object(triton_launch, "repeatable", lambda: repeatable):
        out, logsumexp = triton_launch.forward(p.q, p.k, p.v, p.bias, p.options, p.seed)
        gradients = triton_launch.backward(
            p.grad_out, p.q, p.k, p.v, p.bias, out, logsumexp, p.options, p.seed, p.bias_learns
        )
    return logsumexp, [out, *(gradient for gradient in gradients if gradient is not None)]


def check(p: Problem) -> None:
    """Kernels against float64: output, logsumexp and every gradient, as exact as torch's; dq in both of its ways."""
    logsumexp, ours = kernels(p)
    again = kernels(p, repeatable=True)[1]
    assert torch.equal(again[0], ours[0])
    keep = None if p.seed is None else triton_launch.kept(p.q, p.k, p.options, p.seed)
    true_logsumexp, truth = _by_autograd(p, torch.float64, keep)
    _, unfused = _by_autograd(p, p.q.dtype, keep)
    fused, _ = _by_recomputing(p, p.q.dtype, keep)
    _, cancelling = _by_recomputing(p, torch.float64, keep)
    assert len(ours) == len(again) == len(truth)
    both = [*zip(NAMES, ours, unfused, fused, truth, strict=False)]
    both += zip(NAMES[1:], again[1:], unfused[1:], fused[1:], truth[1:], strict=False)
    for name, got, one, other, true in both:
        assert got.isfinite().all(), name
        if not got.numel():
            continue
        # What no order of sums avoids: the rounding of a score, and where dp - delta is nearly 0 that of both products.
        assert_as_accurate(got, (one, other), true, name, inner=cancelling.get(name, 0.0))
    nothing = true_logsumexp.isneginf()
    assert torch.equal(logsumexp.isneginf(), nothing)
    # Three roundings of the highest score and of the sum beside it, in float32.
    torch.testing.assert_close(
        logsumexp.double().masked_fill(nothing, 0), true_logsumexp.masked_fill(nothing, 0), rtol=3e-7, atol=2e-6
    )


def _by_autograd(p: Problem, dtype: torch.dtype, keep: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    inputs, bias = _copies(p, dtype)
    out, logsumexp = attention(*inputs, bias, p.options, keep)
    wanted = [*inputs, bias] if p.bias_learns else inputs
    return logsumexp, [out.detach(), *torch.autograd.grad(out, wanted, p.grad_out.to(dtype))]


def _by_recomputing(p: Problem, dtype: torch.dtype, keep: Tensor | None) -> tuple[list[Tensor], dict[str, float]]:
    """As torch's fused kernels order it: probabilities from the rounded logsumexp, and delta from the rounded output.

    So the error of every fused kernel is larger than that of autograd, which keeps the probabilities. Also, by the name
    of each result, how far it moves for a relative change of all scores, which each way adds up in another order, or of
    all terms of dp - delta: the larger of both, by absolute values.
    """
    inputs, bias = _copies(p, dtype)
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]

    def of_keys(x: Tensor) -> Tensor:
        """The sum over the query heads that share a key head."""
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    scores = masked_scores(q, k, bias, p.options)
    out, logsumexp = (found.detach() for found in attention(q, k, v, bias, p.options, keep))
    grad_out = p.grad_out.to(dtype)
    with torch.no_grad():
        weights = (scores - logsumexp.masked_fill(logsumexp.isneginf(), 0)[..., None]).exp()
        factor = torch.ones_like(weights) if keep is None else keep.to(dtype) * p.options.keep_scale()
        values = v.repeat_interleave(group, 1).transpose(-2, -1)
        ds = weights * (grad_out @ values * factor - (grad_out * out).sum(-1, keepdim=True))
        terms = grad_out.abs() @ values.abs() * factor + (grad_out * out).abs().sum(-1, keepdim=True)
        terms = weights * terms
        dv = of_keys((weights * factor).transpose(-2, -1) @ grad_out)
        per_head = terms.transpose(-2, -1) @ q.abs() * abs(p.options.scale)
        shaken = weights * torch.where(weights > 0, scores, 0).abs()
        largest = {
            "out": (shaken * factor @ v.abs().repeat_interleave(group, 1)).max().item(),
            "dv": ((shaken * factor).transpose(-2, -1) @ grad_out.abs())
            .unflatten(1, (k.shape[1], group))
            .sum(2)
            .max()
            .item(),
            "dq": (terms @ k.abs().repeat_interleave(group, 1) * abs(p.options.scale)).max().item(),
            "dk": of_keys(per_head).max().item(),
        }
        if p.bias_learns and bias is not None:
            largest["dbias"] = terms.sum_to_size(bias.shape).max().item()
    dq, dk, *dbias = torch.autograd.grad(scores, [q, k, bias] if p.bias_learns else [q, k], ds)
    return [out, dq, dk, dv, *dbias], largest


def _copies(p: Problem, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    inputs = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (p.q, p.k, p.v)]
    bias = p.bias.detach().to(dtype, copy=True).requires_grad_() if p.bias_learns and p.bias is not None else p.bias
    return inputs, bias
