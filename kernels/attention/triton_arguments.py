"""What the Triton kernels are given, in tuples with names: triton passes their fields one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.kernels.attention.options import AttentionOptions

LOG2E = 1 / math.log(2)
LARGEST_BLOCK = 256  # of rows or columns
NO_BIAS, ADDED, MASK = 0, 1, 2  # Form.bias


class Heads(NamedTuple):
    """A tensor [batch, heads, rows, columns], and its strides."""

    pointer: Tensor
    batch: int
    head: int
    row: int
    column: int


class ScoreTerms(NamedTuple):
    """Numbers that one compiled kernel takes any of."""

    heads: int
    group: int  # query heads that share a key head
    queries: int
    keys: int
    factor: float  # of one side of the product: a power of two, so exact in every dtype
    unit: float  # of the product: factor * unit is the scale, in the units of the scores
    scale: float
    cap: float  # in the units of the scores
    rest: float  # Form.late: what scores are multiplied by once the highest is subtracted
    rest_2: float  # the same, in units of log 2
    left: int
    right: int
    threshold: int  # the probability to drop, times 2^24
    keep_scale: float


class Form(NamedTuple):
    """What a kernel is compiled for."""

    size: int  # of q and k
    value_size: int
    softcap: bool
    bias: int  # NO_BIAS, ADDED or MASK
    alibi: bool
    left: bool
    right: bool
    dropout: bool
    base_2: bool  # scores are in units of log 2
    late: bool  # scores lack their last factor, for nothing is added to them
    wide: bool  # rows of a head lie so far apart that their offsets need 64 bits


def heads_of(tensor: Tensor) -> Heads:
    """A 4-D tensor with its strides; of a boolean one its bytes."""
    return Heads(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, *tensor.stride())


def terms_of(q: Tensor, k: Tensor, options: AttentionOptions) -> ScoreTerms:
    """The numbers of one call."""
    left, right = options.band()
    longest = q.shape[2] + k.shape[2]  # beyond it a limit is none; kernels count in 32 bits
    factor, rest = _split(options.scale)
    units = LOG2E if _base_2(q) else 1.0
    last = rest if options.softcap is None else options.softcap
    return ScoreTerms(
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        factor=factor,
        unit=rest * units,
        scale=options.scale,
        cap=1.0 if options.softcap is None else options.softcap * units,
        rest=last,
        rest_2=last * LOG2E,
        left=0 if left is None else max(-longest, min(left, longest)),
        right=0 if right is None else max(-longest, min(right, longest)),
        threshold=round(options.dropout_p * (1 << 24)),
        keep_scale=options.keep_scale(),
    )


def form_of(q: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, wide: bool) -> Form:
    """The form that must be compiled for one call.

    Args:
        wide: :func:`is_wide` of all its tensors.
    """
    left, right = options.band()
    kind = NO_BIAS if bias is None else MASK if bias.dtype == torch.bool else ADDED
    return Form(
        size=q.shape[3],
        value_size=v.shape[3],
        softcap=options.softcap is not None,
        bias=kind,
        alibi=options.alibi is not None,
        left=left is not None,
        right=right is not None,
        dropout=options.dropout_p > 0,
        base_2=_base_2(q),
        late=kind != ADDED and options.alibi is None,
        wide=wide,
    )


def is_wide(*tensors: Tensor) -> bool:
    """Check that an element of a head lies 2^31 elements or more from the first, counting what a block reaches over.

    Args:
        tensors: [batch, heads, rows, columns], any strides.
    """
    return any(
        (x.shape[2] + LARGEST_BLOCK) * x.stride(2) + (x.shape[3] + LARGEST_BLOCK) * x.stride(3) >= 1 << 31
        for x in tensors
    )


def _base_2(q: Tensor) -> bool:
    return q.dtype != torch.float32


def _split(scale: float) -> tuple[float, float]:
    """(a power of two at most 1 with the scale's sign, the positive rest)."""
    if scale == 0:
        return 0.0, 1.0
    factor = min(1.0, 2.0 ** math.floor(math.log2(abs(scale))))
    return math.copysign(factor, scale), abs(scale) / factor
