"""Random bits of an element, from its index and a seed: a hash instead of a sequence.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: a generator that hashes a counter needs no state,
so that any mask can be computed again in any order. Their Philox takes 32 x 32 -> 64 bit products, which torch has not
got on a CPU; this hash takes products modulo 2³², two keys, and the multipliers that C. Wellons and his readers found
by searching for low bias ("Prospecting for hash functions", 2018):

    h = (index xor key0) * A;  h ^= h >> 15;  h = (h xor key1) * B;  h ^= h >> 16;  h *= C

The keys are the halves of a 64-bit seed; every 2³² elements key0 moves on. The second key stands between two products
so that masks of two seeds are not one mask, moved. An element is dropped where ``h`` as a signed number is below a
threshold, which the highest bits decide: those that all others have been mixed into. With one product less, the masks
of neighbouring seeds are alike and the spectrum has lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND, THIRD = 0x2C1B3C6D, 0x7FEB352D, 0x297A2D39
NEXT_BLOCK = 0x1E3779B9  # added to key0 every 2³² elements
CHUNK = 1 << 18  # elements: 1 MiB of bits, which the second-level cache holds; divides 2³²


def threshold(p: float) -> int:
    """Below which, as a signed 32-bit number, a share ``p`` of all hashes lies; ``p`` below 1."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def draw_seed(device: torch.device) -> Tensor:
    """A scalar int64 tensor from torch's generator of the device, without waiting for it."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def signed(value: int) -> int:
    """The same 32 bits as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


class Bits:
    """Hashes of consecutive elements on the CPU, a chunk at a time, in memory that is used again."""

    def __init__(self, seed: int, most: int) -> None:
        """Prepare the hash of ``seed`` for chunks of up to ``most`` elements."""
        self._low, self._high = signed(seed), signed(seed >> 32)
        self._index = torch.arange(most, dtype=torch.int32)
        self._hash, self._shifted = (torch.empty(most, dtype=torch.int32) for _ in range(2))

    def below(self, limit: int, start: int, count: int) -> Tensor:
        """Hash the elements from ``start``, a multiple of a chunk: bool [count], true below ``limit``."""
        hashed, shifted = self._hash[:count], self._shifted[:count]
        key = signed(self._low + NEXT_BLOCK * (start >> 32))
        # The bits of a chunk's start and those within it do not overlap.
        torch.bitwise_xor(self._index[:count], signed(key ^ (start & 0xFFFFFFFF)), out=hashed)
        hashed.mul_(FIRST)
        self._fold(hashed, shifted, 15)
        hashed.bitwise_xor_(self._high).mul_(SECOND)
        self._fold(hashed, shifted, 16)
        return hashed.mul_(THIRD) < limit

    @staticmethod
    def _fold(hashed: Tensor, shifted: Tensor, by: int) -> None:
        """``hashed ^= hashed >> by`` of unsigned numbers; torch's shift drags the sign along."""
        torch.bitwise_right_shift(hashed, by, out=shifted)
        hashed.bitwise_xor_(shifted.bitwise_and_((1 << (32 - by)) - 1))
