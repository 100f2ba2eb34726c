"""The largest batch size that fits."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 2**20  # nobody asks for more samples in one step


def largest_that(fits: Callable[[int], bool], start: int = 1) -> int:
    """The largest batch size for which ``fits`` holds, up to :data:`LIMIT`; 0 where not even 1 does.

    Memory is taken to grow with the batch: found by doubling from ``start`` and then halving between.
    """
    low, high = 0, max(start, 1)
    while fits(high):
        if high >= LIMIT:
            return LIMIT
        low, high = high, min(2 * high, LIMIT)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
