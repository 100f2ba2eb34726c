"""Attention on the CPU without mask and dropout, some whole rows of scores at a time; gradients into given views.

torch's softmax takes a row in one pass, maximum, exponential and sum; its exponential alone takes longer. So backward
computes the probabilities of some rows again from q and k, as Rabe and Staats do (Self-attention does not need O(n²)
memory, arXiv:2112.05682), rather than from a logsumexp. With S = scale · q kᵀ, P = softmax(S) and do the gradient of
the output:

    dv = Pᵀ do        dS = P (do vᵀ - Σ P do vᵀ)        dq = scale · dS k        dk = scale · dSᵀ q

With a causal mask a block of rows has the keys up to its last row's: only ROWS / 2 scores of a row are for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 64  # of a block
SCORES = 1 << 18  # of a block, for each thread: 1 MiB of float32


def _blocks(q: Tensor, kv_heads: int) -> Iterator[tuple[int, slice, slice]]:
    """A sample, some key heads, and the query heads that read them."""
    repeats = q.shape[1] // kv_heads
    each = max(1, SCORES * torch.get_num_threads() // max(1, ROWS * q.shape[2] * repeats))
    for sample in range(q.shape[0]):
        for first in range(0, kv_heads, each):
            last = min(first + each, kv_heads)
            yield sample, slice(first, last), slice(first * repeats, last * repeats)


def _probabilities(q: Tensor, k: Tensor, rows: slice, is_causal: bool, out: Tensor) -> Tensor:
    """[head, row, key] of scaled ``q`` [head, query, size] and ``k`` [head, key, size], in the memory of ``out``."""
    keys = rows.stop if is_causal else k.shape[1]
    shape = (q.shape[0], rows.stop - rows.start, keys)
    scores = out[: shape[0] * shape[1] * shape[2]].view(shape)
    torch.bmm(q[:, rows], k[:, :keys].transpose(1, 2), out=scores)
    if is_causal:
        square = torch.full((shape[1], shape[1]), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
        scores[:, :, rows.start :].add_(square)
    return torch.softmax(scores, 2, out=scores)


def _scratch(q: Tensor, heads: slice, kept: dict[str, Tensor], name: str) -> Tensor:
    """Memory for the scores of a block, the same at each call: fresh pages cost as much as a pass over them."""
    size = (heads.stop - heads.start) * min(ROWS, q.shape[2]) * q.shape[2]
    if name not in kept or kept[name].numel() < size:
        kept[name] = torch.empty(size, dtype=q.dtype, device=q.device)
    return kept[name]


def _row_blocks(tokens: int) -> list[slice]:
    """The last rows first: they are those with all keys."""
    return [slice(start, min(start + ROWS, tokens)) for start in reversed(range(0, tokens, ROWS))]


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, out: Tensor) -> None:
    """Write the output into ``out``.

    Args:
        q, out: [batch, heads, tokens, size], any strides.
        k, v: [batch, kv heads, tokens, size].
    """
    kept: dict[str, Tensor] = {}
    repeats = q.shape[1] // k.shape[1]
    for sample, few, heads in _blocks(q, k.shape[1]):
        queries = q[sample, heads] * scale
        keys, values = (_repeated(x[sample, few], repeats) for x in (k, v))
        for rows in _row_blocks(q.shape[2]):
            weights = _probabilities(queries, keys, rows, is_causal, _scratch(q, heads, kept, "scores"))
            out[sample, heads, rows] = torch.bmm(weights, values[:, : weights.shape[2]])


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    is_causal: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write the gradients into ``dq``, ``dk`` and ``dv``, of the shapes of q, k and v and any strides."""
    kept: dict[str, Tensor] = {}
    repeats = q.shape[1] // k.shape[1]
    for sample, few, heads in _blocks(q, k.shape[1]):
        queries, grads = q[sample, heads] * scale, grad_out[sample, heads].contiguous()
        keys, values = (_repeated(x[sample, few], repeats) for x in (k, v))
        key_sum, value_sum = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _row_blocks(q.shape[2]):
            weights = _probabilities(queries, keys, rows, is_causal, _scratch(q, heads, kept, "scores"))
            count = weights.shape[2]
            # Not baddbmm_: into part of a tensor it multiplies head by head.
            value_sum[:, :count].add_(torch.bmm(weights.transpose(1, 2), grads[:, rows]))
            slopes = _scratch(q, heads, kept, "slopes")[: weights.numel()].view(weights.shape)
            torch.bmm(grads[:, rows], values[:, :count].transpose(1, 2), out=slopes)
            torch._softmax_backward_data(slopes, weights, 2, q.dtype, grad_input=slopes)
            key_sum[:, :count].add_(torch.bmm(slopes.transpose(1, 2), queries[:, rows]))
            dq[sample, heads, rows] = torch.bmm(slopes, keys[:, :count]).mul_(scale)
        dk[sample, few] = _summed(key_sum, repeats)
        dv[sample, few] = _summed(value_sum, repeats)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    """Each head ``repeats`` times, contiguous: a matrix whose rows lie far apart is slow to multiply."""
    return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, 0)


def _summed(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.unflatten(0, (-1, repeats)).sum(1)
