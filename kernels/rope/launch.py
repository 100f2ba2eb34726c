"""The rotation by either path; one node of a compiled graph."""

from __future__ import annotations

from torch import Tensor

from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque
from gradscope.kernels.rope import cpu
from gradscope.kernels.rope.layout import empty_as

HEADS = 4  # that one program turns by the tables it has loaded
THREADS = 128  # of a program
_MOST_TOKENS = 64


def _fake(given: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, sign: int, backend: str) -> list[Tensor]:
    return [empty_as(x) for x in given]


@opaque("rope", _fake)
def rotated(given: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, sign: int, backend: str) -> list[Tensor]:
    """Each tensor rotated, in memory of its own.

    Args:
        given: [batch, heads, tokens, size] each, any strides.
        cos, sin: [batch or 1, 1, tokens, pairs], float32, or float64 for float64.
        sign: 1, or -1 for the inverse.
        backend: "cpu" or "triton".

    Returns:
        As ``given``; tokens before heads in memory where a tensor has them so.
    """
    made = [empty_as(x) for x in given]
    if backend == "cpu":
        cpu.rotate(given, cos, sin, interleaved, sign, made)
        return made
    for x, out in zip(given, made, strict=True):
        if x.numel():
            _launch(x, cos, sin, interleaved, sign, out)
    return made


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, out: Tensor) -> None:
    import triton

    from gradscope.kernels.rope.triton_kernels import rotate as kernel

    batch, heads, tokens, size = x.shape
    pairs = cos.shape[-1]
    cos, sin = (table.expand(batch, 1, tokens, pairs) for table in (cos, sin))
    rest = size - 2 * pairs
    block = block_of(tokens, pairs, x.element_size())
    with on_device(x):
        kernel[(batch * ((tokens + block - 1) // block), (heads + HEADS - 1) // HEADS)](
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
            WIDE=any(_reach(each, block) >= 1 << 31 for each in (x, cos, sin, out)),
            BLOCK_TOKENS=block,
            BLOCK_PAIRS=triton.next_power_of_2(pairs),
            BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            HEADS=HEADS,
            num_warps=THREADS // 32,
        )


def block_of(tokens: int, pairs: int, element_size: int) -> int:
    """Tokens of a program: 16 bytes a thread of each half of the pairs, so that every access is a whole one."""
    wide = 1 << (pairs - 1).bit_length()
    wanted = THREADS * (16 // element_size) // wide
    return max(1, min(wanted, _MOST_TOKENS, 1 << (tokens - 1).bit_length()))


def _reach(x: Tensor, block: int) -> int:
    """The largest offset from the first token of a block; of features as many as their powers of two."""
    return block * x.stride(2) + 2 * x.shape[3] * x.stride(3)
