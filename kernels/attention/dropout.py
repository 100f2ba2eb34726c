"""Which attention weights dropout keeps, from a seed and their position alone: nothing is stored, any block will do.

Every query row and every key has a key of 32 random bits: splitmix64 (Steele, Lea and Flood, Fast Splittable
Pseudorandom Number Generators, 2014) of the seed and its number. A weight is kept where a hash of the sum of its row's
and its column's bits is above the threshold: two rounds of the xor-shift and multiply of a 32-bit finalizer, of which
the highest 31 bits are read. torch's shifts are signed: x ^ (x >> n) then clears the highest bit and, where it was set,
flips the n below, which maps two words each to one and so stays uniform. Everything is integer arithmetic that torch's
CPU kernels vectorize, in ten passes over the block: drawing from a generator costs ten times as much, and comparing to
booleans another three.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of ``device``: int64, [1], not read by the host."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold(dropout_p: float) -> int:
    """So many of 2³¹ hashes are dropped."""
    return round(dropout_p * 2**31)


def keys_of(seed: int, side: int, count: int, device: torch.device) -> Tensor:
    """Random bits of rows (``side`` 0; row (batch · heads + head) · queries + query) or keys (1): int32, [count]."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    x.mul_(2).add_(side).mul_(_signed(0x9E3779B97F4A7C15)).add_(_mixed(seed))
    x.bitwise_xor_((x >> 30) & 0x3FFFFFFFF).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_((x >> 27) & 0x1FFFFFFFFF).mul_(_signed(0x94D049BB133111EB))
    return (x >> 32).to(torch.int32)


def kept_bits(rows: Tensor, columns: Tensor, below: int, out: Tensor, scratch: Tensor) -> Tensor:
    """Bits that are all ones where a weight is kept, 0 where it is dropped; int32, to be and-ed with a float's own.

    Args:
        rows, columns: from :func:`keys_of`, broadcastable to ``out``.
        below: from :func:`threshold`.
        out, scratch: int32, of the block's shape; overwritten. ``out`` is returned.
    """
    torch.add(rows, columns, out=out)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        torch.bitwise_right_shift(out, shift, out=scratch)
        out.bitwise_xor_(scratch).mul_(factor)
    # With hashes in [-2³⁰, 2³⁰) the difference is no overflow; it is negative where the weight is kept, and its sign
    # fills the word.
    return torch.sub(below - 2**30 - 1, out.bitwise_right_shift_(1), out=out).bitwise_right_shift_(31)


def zero_dropped(weights: Tensor, kept: Tensor, out: Tensor) -> Tensor:
    """``weights`` where ``kept`` is all ones, else 0, into ``out``."""
    if weights.dtype == torch.float32:
        torch.bitwise_and(weights.view(torch.int32), kept, out=out.view(torch.int32))
    else:
        torch.bitwise_and(weights.view(torch.int64), kept.to(torch.int64), out=out.view(torch.int64))
    return out


def keep_mask(seed: Tensor, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """The mask of the weights that the CPU path keeps, all at once: boolean [batch, heads, queries, keys]."""
    batch, heads, queries, keys = shape
    rows = keys_of(int(seed), 0, batch * heads * queries, seed.device).view(batch, heads, queries, 1)
    out = torch.empty(shape, dtype=torch.int32, device=seed.device)
    columns = keys_of(int(seed), 1, keys, seed.device)
    return kept_bits(rows, columns, threshold(dropout_p), out, torch.empty_like(out)) != 0


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    return (value & (2**64 - 1)) - 2**64 if value & 2**63 else value


def _mixed(seed: int) -> int:
    """A seed next to another gives numbers unlike the other's."""
    z = (seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & (2**64 - 1)
    return _signed(z ^ (z >> 31))
