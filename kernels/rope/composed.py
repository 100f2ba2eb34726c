"""The rotation by torch's own differentiable operations, where those are sooner than a Function of ours on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotated(
    given: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, *, doubled: bool = False
) -> tuple[Tensor, ...]:
    """Each of ``given`` [batch, heads, tokens, size], turned by tables of the angles, as models write it.

    Halves are exchanged and multiplied by doubled tables, interleaved pairs are complex numbers.

    Args:
        cos, sin: [..., tokens, pairs], of one dtype, in whose precision it is computed.
        doubled: of halves, the tables are [..., tokens, 2 * pairs], with a number for each feature.
    """
    if interleaved:
        factor = torch.complex(cos, sin)
        return tuple(_product(x, factor) for x in given)
    if not doubled:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return tuple(_exchanged(x, cos, sin) for x in given)


def _exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, size = cos.shape[-1], x.shape[-1]
    head = x if rotary == size else x[..., :rotary]
    if head.dtype is not cos.dtype:
        head = head.to(cos.dtype)
    a, b = head.chunk(2, -1)
    turned = (head * cos).addcmul(torch.cat((-b, a), -1), sin)
    return _whole(turned, x, rotary)


def _product(x: Tensor, factor: Tensor) -> Tensor:
    rotary, size = 2 * factor.shape[-1], x.shape[-1]
    head = x if rotary == size else x[..., :rotary]
    wide = factor.dtype.to_real()
    pairs = (head if head.dtype is wide else head.to(wide)).unflatten(-1, (-1, 2))
    strides = pairs.stride()
    if strides[-1] != 1 or any(stride & 1 for stride in (*strides[:-1], int(pairs.storage_offset()))) or pairs.is_neg():
        # Not contiguous(): what is contiguous at an odd place stays there.
        pairs = pairs.resolve_neg().clone(memory_format=torch.contiguous_format)
    return _whole(torch.view_as_real(torch.view_as_complex(pairs) * factor).flatten(-2), x, rotary)


def _whole(turned: Tensor, x: Tensor, rotary: int) -> Tensor:
    """With the features that are not turned behind it, in the dtype of ``x``."""
    if turned.dtype is not x.dtype:
        turned = turned.to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), -1)
