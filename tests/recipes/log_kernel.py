"""A kernel that takes logarithms, imported while Triton is interpreted where there is no GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.logarithm.triton_kernels import log


@triton.jit
def logarithms(numbers, found, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logarithm of each of ``block`` numbers."""
    at = tl.arange(0, block)
    tl.store(found + at, log(tl.load(numbers + at)))
