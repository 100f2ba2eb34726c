"""Attention by plain operations that hold all its weights, in as few passes as torch's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from gradscope.recipes.attention_arguments import Arguments
from gradscope.recipes.attention_sizes import one_mask


def attention_weights(given: Arguments) -> Tensor:
    """The softmax of the scores, before dropout: [batch, heads, queries, keys] in the dtype of the scores.

    A row that sees no key is zeros. Where there are sinks, the weights of a row add up to less than 1.
    """
    q, k = given.q, given.k
    if given.grouped:
        k = k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), dim=1)
    if given.softcap is None:
        scores = (q * given.scale) @ k.transpose(-2, -1)
    else:
        scores = torch.tanh((q * (given.scale / given.softcap)) @ k.transpose(-2, -1)) * given.softcap
    mask = one_mask(given)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if given.sinks is None:
        return torch.ops.aten._safe_softmax.default(scores, -1)  # torch._safe_softmax cannot be traced
    sinks = given.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.ops.aten._safe_softmax.default(torch.cat((scores, sinks), -1), -1)[..., :-1]


def weighed(given: Arguments, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The result [batch, heads, queries, value size], and the weights after dropout."""
    v = given.v
    if given.grouped:
        v = v.repeat_interleave(given.q.shape[1] // max(1, v.shape[1]), dim=1)
    if given.dropout_p > 0:
        weights = dropout(weights, given.dropout_p)
    return (weights.to(v.dtype) @ v).to(given.q.dtype), weights
