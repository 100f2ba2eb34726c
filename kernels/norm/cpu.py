"""RMS and layer normalisation on the CPU, a few rows at a time.

RMS, for which torch has no kernel of its own there: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization",
2019. With r = 1 / √(mean h² + ε) and the upstream d,

    y = h r w,   d w = Σ_rows d h r,   d h = r (d w - h r · mean(d w h r))

Only r is kept beside h; h r is computed again. Where r may be ``most`` at the most, as in h / max(‖h‖, δ), a row that
it is cut off for has it as a constant: d h = r d w.

Layer normalisation is torch's kernel. That adds up the gradients of weight and bias row by row in one float32, which
over thousands of rows is several times less exact than torch's own sum; here it does so for a few hundred rows, and
these sums are added.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 1 << 18  # elements, 1 MiB of float32: smaller ones cost more in starting threads than the cache saves

SUMMED = 128  # rows that one float32 takes the sum of: of more, one thread adds up less exactly than plain operations


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which rows are normalised and sums are taken: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(rows: Tensor) -> list[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]


def rms_forward(h: Tensor, weight: Tensor | None, eps: float, most: float = math.inf) -> tuple[Tensor, Tensor]:
    """Normalised rows, in the dtype of ``h``, and r [rows, 1].

    Args:
        h: [rows, features], neither of them 0; of a floating dtype.
        weight: [features], or None for ones.
        most: the largest r.
    """
    dtype = accumulate_dtype(h.dtype)
    output = torch.empty(h.shape, dtype=h.dtype)
    factor = torch.empty((h.shape[0], 1), dtype=dtype)
    scale = None if weight is None else weight.to(dtype)
    for part in _parts(h):
        x = h[part].to(dtype)
        r = torch.linalg.vecdot(x, x).div_(h.shape[1]).add_(eps).rsqrt_()[:, None]
        r = r if math.isinf(most) else r.clamp_(max=most)
        factor[part] = r
        y = torch.mul(x, r, out=output[part]) if h.dtype == dtype else x * r
        if scale is not None:
            y.mul_(scale)
        if y.dtype != h.dtype:
            output[part] = y
    return output, factor


def rms_backward(
    upstream: Tensor, h: Tensor, factor: Tensor, weight: Tensor | None, wanted: bool, most: float = math.inf
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``h``, in its dtype, and of ``weight`` where that is wanted, in the accumulating dtype."""
    dtype = factor.dtype
    gradient = torch.empty(h.shape, dtype=h.dtype)
    scale = None if weight is None else weight.to(dtype)
    summed = torch.zeros(h.shape[1], dtype=dtype) if wanted else None
    for part in _parts(h):
        d, r = upstream[part].to(dtype), factor[part]
        normal = h[part].to(dtype) * r
        both = d * normal
        if summed is not None:
            summed += both.sum(0)
        mean = both.sum(1) if scale is None else both @ scale
        mean = mean if math.isinf(most) else mean.masked_fill_(r[:, 0] == r.new_tensor(most), 0.0)
        slope = (d.clone() if scale is None else d * scale).addcmul_(normal, mean.div_(h.shape[1])[:, None], value=-1)
        torch.mul(slope, r, out=slope)
        gradient[part] = slope
    return gradient, summed


def layer_backward(
    upstream: Tensor, h: Tensor, mean: Tensor, factor: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``h``, weight and bias, in their dtypes; None where there is no weight or bias.

    Args:
        upstream, h: [rows, features].
        mean, factor: [rows, 1], as torch.native_layer_norm gives them.
        weight, bias: [features].
    """
    wanted = [True, weight is not None, bias is not None]
    shape, rows = h.shape[1:], h.shape[0]
    backward = torch.ops.aten.native_layer_norm_backward
    exact = all(each is None or each.dtype == torch.float32 for each in (weight, bias))
    if rows <= SUMMED or not exact or not any(wanted[1:]):
        found: tuple[Tensor, Tensor | None, Tensor | None] = backward(
            upstream, h, shape, mean, factor, weight, bias, wanted
        )
        return found
    gradient = torch.empty(h.shape, dtype=h.dtype)
    of_weight, of_bias = (None if each is None else torch.zeros_like(each) for each in (weight, bias))
    for start in range(0, rows, SUMMED):
        part = slice(start, start + SUMMED)
        gradient[part], *sums = backward(upstream[part], h[part], shape, mean[part], factor[part], weight, bias, wanted)
        for whole, one in zip((of_weight, of_bias), sums, strict=True):
            if whole is not None:
                whole.add_(one)
    return gradient, of_weight, of_bias
