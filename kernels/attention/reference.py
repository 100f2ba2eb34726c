"""Attention by plain operations, all scores at once: what the fast paths are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.attention.options import AttentionOptions


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, by autograd's own operations; give float64 for the truth.

    Args:
        q: [batch, heads, queries, size].
        k, v: [batch, kv heads, keys, size]; v's size may be another.
        bias: added to the scores, or a boolean mask (True takes part); broadcast to [batch, heads, queries, keys].
        keep: [batch, heads, queries, keys], boolean: what dropout keeps. None keeps all.

    Returns:
        [batch, heads, queries, v's size] and [batch, heads, queries], in q's dtype.
    """
    scores = masked_scores(q, k, bias, options)
    logsumexp = scores.detach().logsumexp(-1)
    # softmax of a row of -inf is NaN, and so is its gradient: such a row gets zeros instead of scores, and no output.
    nothing = torch.isneginf(logsumexp)[..., None]
    scores = scores.masked_fill(nothing, 0.0)
    weights = scores.softmax(-1).masked_fill(nothing, 0.0)
    if options.sinks is not None:
        own, sinks = scores.logsumexp(-1), options.sinks.to(scores.dtype)[:, None]
        weights = weights * (own - torch.logaddexp(own, sinks)).exp()[..., None]
        logsumexp = torch.logaddexp(logsumexp, sinks.detach())
    if keep is not None:
        weights = weights * keep * options.keep_scale()
    return weights @ _all_heads(v, q.shape[1]), logsumexp


def masked_scores(q: Tensor, k: Tensor, bias: Tensor | None, options: AttentionOptions) -> Tensor:
    """The scores [batch, heads, queries, keys] after everything that options.py names."""
    scores = (q * options.scale) @ _all_heads(k, q.shape[1]).transpose(-2, -1)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias
    i, j = _positions(scores)
    if options.alibi is not None:
        scores = scores - options.alibi.to(scores.dtype)[..., None, None] * (i - j).abs()
    left, right = options.band()
    seen = i + j >= 0
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    return scores.masked_fill(~seen, -torch.inf)


def _positions(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys, broadcast to the scores; of a subclass if they are: DTensor mixes no others."""
    if type(scores) is Tensor:
        _, _, queries, keys = scores.shape
        return torch.arange(queries, device=scores.device)[:, None], torch.arange(keys, device=scores.device)[None, :]
    ones = torch.ones_like(scores, dtype=torch.int64)
    return ones.cumsum(-2) - 1, ones.cumsum(-1) - 1


def _all_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // max(1, tensor.shape[1]), dim=1)
