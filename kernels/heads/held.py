"""Attention of many short sequences on the CPU, whose scores are few enough to be held; nodes of a compiled graph.

Where a head's products take microseconds, passes and calls are what counts: queries, keys and values are brought
together once, for all heads, and each step is one call for all of them. With S = scale · q kᵀ, P = softmax(S) and do
the gradient of the output:

    dv = Pᵀ do        dS = P (do vᵀ - Σ P do vᵀ)        dq = scale · dS k        dk = scale · dSᵀ q

torch's softmax of a row that does not fill a vector register goes number by number. So scores of fewer than SHORT
tokens are turned, [key, query], and the softmax goes down the columns, SHORT queries at once; those beyond the last
token are zeros, whose results and gradients nobody reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.opaque import opaque

SHORT = 16  # float32 numbers in AVX-512's registers; two of AVX2's


def _rows(tokens: int) -> int:
    """Rows of queries."""
    return max(tokens, SHORT)


def _forward_fake(qkv: Tensor, heads: int, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    size, all_heads, rows = width // (3 * heads), heads * batch, _rows(tokens)
    return (
        qkv.new_empty(batch, tokens, heads * size),
        qkv.new_empty(all_heads, rows, size),
        qkv.new_empty(2, all_heads, tokens, size),
        qkv.new_empty((all_heads, tokens, rows)),
    )


@opaque("short_attention", _forward_fake)
def forward(qkv: Tensor, heads: int, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output with merged heads, and what :func:`backward` needs.

    Args:
        qkv: [batch, tokens, 3 · heads · size], any strides, float32 or float64.

    Returns:
        [batch, tokens, heads · size]; scaled queries [heads · batch, rows, size], of at least SHORT rows; keys and
        values [2, heads · batch, tokens, size]; probabilities, [heads · batch, query, key] or, below SHORT tokens,
        [heads · batch, key, row].
    """
    batch, tokens, width = qkv.shape
    size, rows, turned = width // (3 * heads), _rows(tokens), tokens < SHORT
    by_head = qkv.reshape(batch, tokens, 3 * heads, size).permute(2, 0, 1, 3)
    q = (torch.zeros if turned else torch.empty)((heads * batch, rows, size), dtype=qkv.dtype, device=qkv.device)
    torch.mul(by_head[:heads], scale, out=q.view(heads, batch, rows, size)[:, :, :tokens])
    keys_values = torch.empty((2, heads * batch, tokens, size), dtype=qkv.dtype, device=qkv.device)
    keys_values.view(2 * heads, batch, tokens, size).copy_(by_head[heads:])
    k, v = keys_values.unbind(0)
    left, right = (k, q.transpose(1, 2)) if turned else (q, k.transpose(1, 2))
    if is_causal:
        future = torch.full((left.shape[1], right.shape[2]), -torch.inf, dtype=qkv.dtype, device=qkv.device)
        scores = torch.baddbmm(future.tril_(-1) if turned else future.triu_(1), left, right)
    else:
        scores = torch.bmm(left, right)
    weights = torch.softmax(scores, 1 if turned else 2)
    found = torch.bmm(weights.transpose(1, 2) if turned else weights, v)
    merged = torch.empty((batch, tokens, heads, size), dtype=qkv.dtype, device=qkv.device)
    merged.copy_(found.view(heads, batch, rows, size)[:, :, :tokens].permute(1, 2, 0, 3))
    return merged.view(batch, tokens, heads * size), q, keys_values, weights


def _backward_fake(
    grad_out: Tensor, q: Tensor, keys_values: Tensor, weights: Tensor, heads: int, scale: float
) -> Tensor:
    batch, tokens, width = grad_out.shape
    return grad_out.new_empty(batch, tokens, 3 * width)


@opaque("short_attention_backward", _backward_fake)
def backward(grad_out: Tensor, q: Tensor, keys_values: Tensor, weights: Tensor, heads: int, scale: float) -> Tensor:
    """Gradient of ``qkv``, contiguous.

    Args:
        grad_out: [batch, tokens, heads · size], any strides.
        q, keys_values, weights: what :func:`forward` returned.
    """
    batch, tokens, width = grad_out.shape
    size, rows, turned = width // heads, q.shape[1], tokens < SHORT
    k, v = keys_values.unbind(0)
    grads = torch.zeros_like(q) if turned else torch.empty_like(q)
    by_head = grad_out.reshape(batch, tokens, heads, size).permute(2, 0, 1, 3)
    grads.view(heads, batch, rows, size)[:, :, :tokens].copy_(by_head)
    of_keys_values = torch.empty_like(keys_values)
    torch.bmm(weights if turned else weights.transpose(1, 2), grads, out=of_keys_values[1])
    slopes = torch.bmm(v, grads.transpose(1, 2)) if turned else torch.bmm(grads, v.transpose(1, 2))
    torch._softmax_backward_data(slopes, weights, 1 if turned else 2, weights.dtype, grad_input=slopes)
    del grads
    torch.bmm(slopes if turned else slopes.transpose(1, 2), q, out=of_keys_values[0])
    of_q = torch.bmm(slopes.transpose(1, 2) if turned else slopes, k).view(heads, batch, rows, size)
    del slopes
    packed = torch.empty((batch, tokens, 3 * heads, size), dtype=grad_out.dtype, device=grad_out.device)
    torch.mul(of_q[:, :, :tokens].permute(1, 2, 0, 3), scale, out=packed[:, :, :heads])
    packed[:, :, heads:].copy_(of_keys_values.view(2 * heads, batch, tokens, size).permute(1, 2, 0, 3))
    return packed.view(batch, tokens, 3 * width)
