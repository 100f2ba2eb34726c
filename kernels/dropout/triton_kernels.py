"""The hash of counter.py, and dropout by it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_dropped(index, seed, limit):
    # index: int64, the element's place in the contiguous tensor; seed: int64, loaded. The constants are counter.py's.
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    key = low + (index >> 32).to(tl.uint32) * 0x1E3779B9
    h = (index.to(tl.uint32) ^ key) * 0x2C1B3C6D
    h = h ^ (h >> 15)
    h = (h ^ high) * 0x7FEB352D
    h = h ^ (h >> 16)
    h = h * 0x297A2D39
    return h.to(tl.int32, bitcast=True) < limit


@triton.jit
def dropout(x, seed, output, count, limit, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(is_dropped(at, tl.load(seed), limit), 0.0, value * scale)
    tl.store(output + at, kept.to(output.dtype.element_ty), mask=inside)
