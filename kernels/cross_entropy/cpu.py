"""Loss and gradient on the CPU, a few rows at a time: what is read once stays in the cache until it is used up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype

# Of logits at once, as float32. At 2048 x 50257 on two cores 1 MiB to 16 MiB are equally fast and 256 KiB takes 1.7
# times as long: five rows are too few for a kernel call.
CHUNK_BYTES = 4 << 20


def losses(logits: Tensor, target: Tensor, terms: Terms, scale: Tensor | None, gradient: Tensor | None) -> Tensor:
    """Loss of each row; writes the gradient of ``Σ scale · loss`` where one is wanted.

    Args:
        logits: [batch, classes, positions], any strides, of a floating dtype.
        target: [batch, positions], int64; each is ignored or a class.
        scale: a scalar tensor, or [batch, positions]; None for 1.
        gradient: as ``logits``, overwritten; may be ``logits`` itself. None where only the loss is wanted.

    Returns:
        [batch, positions] in float32, or float64 for float64 logits.
    """
    dtype = accumulate_dtype(logits.dtype)
    batch, classes, positions = logits.shape
    found = torch.empty((batch, positions), dtype=dtype, device=logits.device)
    weight = None if terms.weight is None else terms.weight.to(dtype)
    step = max(1, CHUNK_BYTES // (classes * dtype.itemsize))
    factor = torch.ones((), dtype=dtype, device=logits.device) if scale is None else scale.to(dtype)
    scratch = torch.empty((min(step, batch * positions), classes), dtype=dtype, device=logits.device)
    wide = None if logits.dtype == dtype else torch.empty_like(scratch)
    for rows, columns in _tiles(batch, positions, step):
        x, y = logits[rows, :, columns].transpose(1, 2), target[rows, columns].reshape(-1)
        if wide is not None:
            x = wide[: y.shape[0]].view(x.shape).copy_(x)
        x = x.reshape(-1, classes)
        by = factor[rows, columns].reshape(-1) if factor.dim() else factor
        log_p = scratch[: y.shape[0]]
        if gradient is None:
            loss = _chunk(x, y, terms, weight, by, log_p, None)
        else:
            into = gradient[rows, :, columns].transpose(1, 2)
            direct = into.dtype == dtype and into.is_contiguous()
            slope = into.view(-1, classes) if direct else log_p
            loss = _chunk(x, y, terms, weight, by, log_p, slope)
            if not direct:
                into.copy_(slope.view(into.shape))
        found[rows, columns] = loss.view(rows.stop - rows.start, -1)
    return found


def _tiles(batch: int, positions: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Batches and positions whose product is at most ``step``."""
    if not positions:
        return
    if positions <= step:
        for start in range(0, batch, step // positions):
            yield slice(start, min(start + step // positions, batch)), slice(0, positions)
        return
    for i in range(batch):
        for start in range(0, positions, step):
            yield slice(i, i + 1), slice(start, min(start + step, positions))


def _chunk(
    x: Tensor,
    target: Tensor,
    terms: Terms,
    weight: Tensor | None,
    factor: Tensor,
    log_p: Tensor,
    slope: Tensor | None,
) -> Tensor:
    """The loss of logits [rows, classes]; fills ``log_p`` and then ``slope``, which may be the same, or ``x``.

    The names are those of terms.py.
    """
    classes = x.shape[1]
    if terms.softcap is not None:
        x = torch.tanh(x / terms.softcap).mul_(terms.softcap)
    torch.log_softmax(x, dim=1, out=log_p)
    counts = target != terms.ignore_index
    known = torch.where(counts, target, 0)
    log_p_target = log_p.gather(1, known[:, None])[:, 0]
    own = torch.full_like(log_p_target, 1 - terms.label_smoothing)
    if weight is not None:
        own *= weight[known]
    loss = own * -log_p_target
    others = torch.zeros_like(loss)  # the factor of p that is not the target's
    smooth = terms.label_smoothing / classes
    if smooth:
        # Not a product of matrices: on some CPUs that adds thousands of float32 one by one.
        loss -= smooth * (log_p if weight is None else log_p * weight).sum(1)
        others += smooth * (classes if weight is None else weight.sum())
    if terms.z_loss:
        lse = x.amax(1) - log_p.amax(1)
        loss += terms.z_loss * lse.square()
        others += 2 * terms.z_loss * lse
    if slope is not None:
        cap_slope = None if terms.softcap is None else 1 - (x / terms.softcap).square_()
        # p - 1 cancels where the model is sure of itself; expm1 does not.
        at_target = (own * torch.expm1(log_p_target) + others * log_p_target.exp()) * factor
        torch.exp(log_p, out=slope)
        slope.mul_(((own + others) * factor)[:, None]).scatter_(1, known[:, None], at_target[:, None])
        if smooth:
            even = smooth * factor[..., None]
            slope -= even if weight is None else even * weight
        if cap_slope is not None:
            slope *= cap_slope
    if not counts.all():
        loss.masked_fill_(~counts, 0)
        if slope is not None:
            slope.masked_fill_(~counts[:, None], 0)  # not by a factor: 0 times inf is not 0
    return loss
