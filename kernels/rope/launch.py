"""The rotation by either path; one node of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque
from gradscope.kernels.rope import cpu


def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, backend: str) -> Tensor:
    return empty_as(x)


@opaque("rope", _fake)
def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, backend: str) -> Tensor:
    """``x`` rotated, in memory of its own.

    Args:
        x: [batch, heads, tokens, size], any strides.
        cos, sin: [batch or 1, 1, tokens, pairs], float32, or float64 for float64.
        sign: 1, or -1 for the inverse.
        backend: "cpu" or "triton".

    Returns:
        As ``x``; tokens before heads in memory where ``x`` has them so.
    """
    out = empty_as(x)
    if x.numel():
        (_launch if backend == "triton" else cpu.rotate)(x, cos, sin, interleaved, sign, out)
    return out


def empty_as(x: Tensor) -> Tensor:
    """Uninitialized; dense, with heads next to each other in memory, or tokens, as ``x`` has them."""
    batch, heads, tokens, size = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty((batch, tokens, heads, size), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, out: Tensor) -> None:
    """Not yet run on a GPU."""
    import triton

    from gradscope.kernels.rope.triton_kernels import rotate as kernel

    batch, heads, tokens, size = x.shape
    pairs = cos.shape[-1]
    cos, sin = (table.expand(batch, 1, tokens, pairs) for table in (cos, sin))
    rest = size - 2 * pairs
    block = min(8, triton.next_power_of_2(tokens))
    with on_device(x):
        kernel[(batch * ((tokens + block - 1) // block),)](
            x,
            cos,
            sin,
            out,
            heads,
            tokens,
            size,
            pairs,
            *x.stride(),
            *(cos.stride(axis) for axis in (0, 2, 3)),
            *(sin.stride(axis) for axis in (0, 2, 3)),
            *out.stride(),
            SIGN=sign,
            INTERLEAVED=interleaved,
            COPY_REST=rest > 0,
            BLOCK_TOKENS=block,
            BLOCK_PAIRS=triton.next_power_of_2(pairs),
            BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            num_warps=4,
        )
