"""``tl.log`` is one instruction of a GPU, and off by 2^-22 near 1, where the logarithm may be smaller than that.

A kernel takes one logarithm a row: it may cost a dozen instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log(x):
    """Of float32 numbers, to two units in the last place; of infinity, 0 and NaN as everywhere. None may be subnormal.

    log(m · 2^e) = e · log(2) + 2 atanh((m - 1) / (m + 1)), m between √½ and √2, where seven terms of the series do.
    """
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23  # the bits of √½
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))
    series = 1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * series))
    found = e.to(tl.float32) * 0.6931471805599453 + (2.0 * s + 2.0 * s * z * series)
    found = tl.where(x > 0.0, found, -float("inf"))
    return tl.where(x < float("inf"), found, x)
