"""What sinks do to a finished attention: a key of a head's own score, and of no value, in every row.

Method: with the sink s of a head, a row's logsumexp L becomes L' = log(exp L + exp s), and its output o becomes
o' = exp(L - L') o, for every weight has the larger denominator, and the sink's value is 0. Backward of q, k, v and bias
goes by L' and o' as it does without sinks. The sink's own weight is exp(s - L'), its value 0, so with D = Σ do · o'

    ds = - Σ exp(s - L') D                  over batch and queries
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorb(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output, overwritten, and logsumexp with sinks.

    Args:
        out: [batch, heads, queries, size].
        logsumexp: [batch, heads, queries]; -inf where a row sees no key, whose weight is all the sink's then.
        sinks: [heads], of a floating dtype.
    """
    whole = torch.logaddexp(logsumexp, _rows(sinks, logsumexp))
    out.mul_(_share(logsumexp, whole)[..., None])
    return out, whole


def gradient(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of ``sinks``, from what :func:`absorb` made of output and logsumexp."""
    dots = (grad_out.to(logsumexp.dtype) * out).sum(-1)
    return -(_share(_rows(sinks, logsumexp), logsumexp) * dots).sum((0, 2)).to(sinks.dtype)


def _rows(sinks: Tensor, logsumexp: Tensor) -> Tensor:
    """[heads, 1] in the dtype of sums."""
    return sinks.to(logsumexp.dtype)[:, None]


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole); 0 where the whole is, and nothing is seen."""
    return (part - whole).exp().masked_fill(torch.isneginf(whole), 0.0)
