"""Attention's forward on the CPU: the softmax of a row built up over blocks of keys.

Method: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867), as in Rabe and Staats,
Self-attention does not need O(n²) memory (arXiv:2112.05682), and FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.attention.cpu_blocks import Block, BlockWork, heads_of, rows_of
from gradscope.kernels.attention.layout import empty_as
from gradscope.kernels.attention.options import AttentionOptions, accumulate_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; see options.py for what they are.

    Args:
        q: [batch, heads, queries, size], any strides, of a floating dtype.
        k, v: [batch, kv heads, keys, size]; the size of v may be another.
        bias: boolean or floating, broadcastable to [batch, heads, queries, keys].
        seed: int64, [1]; where there is dropout.

    Returns:
        [batch, heads, queries, v's size] in q's dtype, with heads and queries in memory as q has them; and [batch,
        heads, queries] in float32, or float64 for float64.
    """
    out = empty_as(q, q.shape[1], q.shape[2], v.shape[3])
    logsumexp = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
    if not logsumexp.numel() or not k.shape[2]:
        return out.zero_(), logsumexp.fill_(-torch.inf)
    work = BlockWork(q, k, bias, options, seed)
    into, logsums, queries = (x.unflatten(1, (work.kv_heads, work.repeats)) for x in (out, logsumexp, q))
    for batch, heads in work.groups():
        keys, values = (heads_of(x, batch, heads, work.dtype) for x in (k, v))
        for block in work.query_blocks(batch, heads):
            rows = rows_of(queries, block, work.dtype) * options.scale
            total, logsum = _rows(work, block, rows, keys, values)
            place = (block.batch, block.heads, slice(None), block.queries)
            into[place] = total.view(into[place].shape)
            logsums[place] = logsum.view(logsums[place].shape)
    return out, logsumexp


def _rows(work: BlockWork, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output [group, row, size] and logsumexp [group, row] of a block of queries, over all its keys."""
    total = queries.new_zeros(*queries.shape[:2], values.shape[2])
    highest = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    weight = torch.zeros_like(highest)
    for part in work.key_blocks(block):
        scores = work.scores(queries, keys[:, part.keys], part)
        higher = torch.maximum(highest, scores.amax(2, keepdim=True))
        base = higher.masked_fill(torch.isneginf(higher), 0.0)  # -inf - -inf is no number
        weights = scores.sub_(base).exp_()
        shrink = (highest - base).exp_()
        weight.mul_(shrink).add_(weights.sum(2, keepdim=True))
        if work.options.dropout_p > 0:
            weights, _ = work.drop(weights, part, "other")
        total.mul_(shrink).baddbmm_(weights, values[:, part.keys])
        highest = higher
    logsumexp = (weight.log() + highest).squeeze(2)
    empty = weight == 0
    total.mul_(work.options.keep_scale() / weight.masked_fill_(empty, 1.0))
    return total, logsumexp
