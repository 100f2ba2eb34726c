"""Loss and gradient on the CPU, a few rows at a time: what is read once stays in the cache until it is used up."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype

CHUNK_BYTES = 1 << 20  # of float32 logits: about a core's second-level cache


def losses(logits: Tensor, target: Tensor, terms: Terms, scale: Tensor | None, gradient: Tensor | None) -> Tensor:
    """Loss of each row; writes the gradient of ``Σ scale · loss`` where one is wanted.

    Args:
        logits: [batch, classes, positions], any strides, of a floating dtype.
        target: [batch, positions], int64; each is ignored or a class.
        scale: a scalar tensor; None for 1.
        gradient: as ``logits``, overwritten; None where only the loss is wanted.

    Returns:
        [batch, positions] in float32, or float64 for float64 logits.
    """
    dtype = accumulate_dtype(logits.dtype)
    found = torch.empty(target.shape, dtype=dtype, device=logits.device)
    weight = None if terms.weight is None else terms.weight.to(dtype)
    if logits.shape[2] == 1:
        planes = [(logits[:, :, 0], target[:, 0], found[:, 0], None if gradient is None else gradient[:, :, 0])]
    else:
        planes = [
            (logits[i].t(), target[i], found[i], None if gradient is None else gradient[i].t())
            for i in range(logits.shape[0])
        ]
    step = max(1, CHUNK_BYTES // max(1, logits.shape[1] * dtype.itemsize))
    for rows, classes, into, slopes in planes:
        for start in range(0, rows.shape[0], step):
            part = slice(start, start + step)
            slope = None if slopes is None else slopes[part]
            _chunk(rows[part], classes[part], terms, weight, scale, into[part], slope)
    return found


def _chunk(
    logits: Tensor,
    target: Tensor,
    terms: Terms,
    weight: Tensor | None,
    scale: Tensor | None,
    loss: Tensor,
    gradient: Tensor | None,
) -> None:
    """Fill ``loss`` [rows] and ``gradient`` [rows, classes]; the names are those of terms.py."""
    x = logits.to(loss.dtype)
    if terms.softcap is not None:
        x = torch.tanh(x / terms.softcap) * terms.softcap
    log_p = torch.log_softmax(x, dim=1)
    counts = target != terms.ignore_index
    known = torch.where(counts, target, 0)
    log_p_target = log_p.gather(1, known[:, None])[:, 0]
    own = torch.full_like(loss, 1 - terms.label_smoothing)
    if weight is not None:
        own *= weight[known]
    loss.copy_(own * -log_p_target)
    others = torch.zeros_like(loss)  # the factor of p that is not the target's
    smooth = terms.label_smoothing / logits.shape[1]
    if smooth:
        loss -= smooth * (log_p.sum(1) if weight is None else log_p @ weight)
        others += smooth * (logits.shape[1] if weight is None else weight.sum())
    if terms.z_loss:
        lse = x.amax(1) - log_p.amax(1)
        loss += terms.z_loss * lse.square()
        others += 2 * terms.z_loss * lse
    loss.masked_fill_(~counts, 0)
    if gradient is None:
        return
    # p - 1 cancels where the model is sure of itself; expm1 does not.
    at_target = own * torch.expm1(log_p_target) + others * log_p_target.exp()
    slope = log_p.exp_().mul_((own + others)[:, None]).scatter_(1, known[:, None], at_target[:, None])
    if smooth:
        slope -= smooth if weight is None else smooth * weight
    if terms.softcap is not None:
        slope *= 1 - (x / terms.softcap).square_()
    if scale is not None:
        slope *= scale
    slope.masked_fill_(~counts[:, None], 0)  # not by a factor: 0 times inf is not 0
    gradient.copy_(slope)
