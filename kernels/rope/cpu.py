"""The rotation on the CPU: a few tokens at a time, so that what is read twice is still in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.rope.layout import pairs_of

CHUNK_BYTES = 1 << 18


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, out: Tensor) -> None:
    """Write rotated ``x`` into ``out``, another tensor.

    Args:
        x, out: [batch, heads, tokens, size], any strides.
        cos, sin: [batch or 1, 1, tokens, pairs], float32 or float64.
        sign: 1, or -1 for the inverse.
    """
    rotary = 2 * cos.shape[-1]
    if rotary < x.shape[3]:
        out[..., rotary:] = x[..., rotary:]
    per_token = max(1, x.shape[0] * x.shape[1] * x.shape[3] * x.element_size())
    step = max(1, CHUNK_BYTES // per_token)
    for start in range(0, x.shape[2], step):
        part = slice(start, start + step)
        c, s = cos[:, :, part], sin[:, :, part]
        a, b = pairs_of(x[:, :, part], rotary, interleaved)
        into_a, into_b = pairs_of(out[:, :, part], rotary, interleaved)
        if x.dtype == c.dtype:
            torch.mul(a, c, out=into_a).addcmul_(b, s, value=-sign)
            torch.mul(b, c, out=into_b).addcmul_(a, s, value=sign)
        else:
            into_a.copy_(torch.addcmul(a * c, b, s, value=-sign))
            into_b.copy_(torch.addcmul(b * c, a, s, value=sign))
