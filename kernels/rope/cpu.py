"""The rotation on the CPU, by as few of torch's operations as its layout allows.

Interleaved pairs are complex numbers in memory, and torch's complex product is one pass. Halves take a product of the
whole head with the cosines of both halves, which runs over long rows, and a fused multiply-add into each half. Half as
many features a row, or small pieces that one thread takes alone, cost more than the passes that they save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradscope.kernels.rope.layout import empty_as, pairs_of

SCRATCH_BYTES = 1 << 21  # of a tensor's tokens that are widened or turned at a time

WAYS = {
    True: "a complex multiplication: interleaved pairs are complex numbers in memory",
    False: "a multiplication and two fused multiply-adds into the result",
}  # by interleaved
COMPOSED = {True: "torch's own complex multiplication", False: "the unfused rotation"}


def rotate(
    given: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, sign: int, into: Sequence[Tensor]
) -> None:
    """Write each of ``given``, rotated, into its place in ``into``, which are other tensors.

    Args:
        given, into: [batch, heads, tokens, size] each, any strides.
        cos, sin: [batch or 1, 1, tokens, pairs], float32 or float64.
        sign: 1, or -1 for the inverse.
    """
    rotary = 2 * cos.shape[-1]
    table = torch.complex(cos, sin if sign > 0 else -sin) if interleaved else torch.cat((cos, cos), -1)
    for x, out in zip(given, into, strict=True):
        if not x.numel():
            continue
        x = x.resolve_neg()  # torch's copy into another dtype forgets the sign of a view that is negated
        if rotary < x.shape[3]:
            out[..., rotary:] = x[..., rotary:]
            x, out = x[..., :rotary], out[..., :rotary]
        if interleaved:
            _rotate_interleaved(x, table, out)
        else:
            _rotate_halves(x, table, sin, sign, out)


def _rotate_interleaved(x: Tensor, factor: Tensor, out: Tensor) -> None:
    wide = factor.dtype.to_real()
    if x.dtype == wide and _is_complex_in_memory(x) and _is_complex_in_memory(out):
        torch.mul(_as_complex(x), factor, out=_as_complex(out))
        return
    for part in _parts(x, wide):
        _through_scratch(x[:, :, part], factor[:, :, part], out[:, :, part])


def _through_scratch(x: Tensor, factor: Tensor, out: Tensor) -> None:
    scratch = empty_as(x, factor.dtype.to_real()).copy_(x)
    _as_complex(scratch).mul_(factor)
    out.copy_(scratch)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> None:
    for part in _parts(x, cos.dtype):
        _rotate_halves_of(x[:, :, part], cos[:, :, part], sin[:, :, part], sign, out[:, :, part])


def _rotate_halves_of(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> None:
    wide = x if x.dtype == cos.dtype else empty_as(x, cos.dtype).copy_(x)
    turned = torch.mul(wide, cos, out=out if wide is x else None)
    a, b = pairs_of(wide, cos.shape[-1], interleaved=False)
    into_a, into_b = pairs_of(turned, cos.shape[-1], interleaved=False)
    into_a.addcmul_(b, sin, value=-sign)
    into_b.addcmul_(a, sin, value=sign)
    if turned is not out:
        out.copy_(turned)


def _parts(x: Tensor, wide: torch.dtype) -> Iterator[slice]:
    """Ranges of tokens whose features take ``SCRATCH_BYTES`` in the table's precision."""
    per_token = x.shape[0] * x.shape[1] * x.shape[3] * wide.itemsize
    step = max(1, SCRATCH_BYTES // per_token)
    for start in range(0, x.shape[2], step):
        yield slice(start, start + step)


def _is_complex_in_memory(x: Tensor) -> bool:
    """Check that each two neighbouring features can be viewed as one complex number."""
    batch, head, token, feature = x.stride()
    return feature == 1 and not (batch | head | token | int(x.storage_offset())) & 1 and not x.is_neg()


def _as_complex(x: Tensor) -> Tensor:
    batch, heads, tokens, size = x.shape
    return torch.view_as_complex(x.view(batch, heads, tokens, size // 2, 2))
