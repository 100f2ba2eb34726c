"""What grows: told by how many storages of each size were alive after each of some steps in a row.

A step that leaves something behind is no leak yet. A loader that looks ahead leaves the next batch, a window of the
last outputs its newest one, and both have let go of an older one of that size: their number stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

FEWEST_STEPS = 3  # in each of which it must grow

Key = TypeVar("Key", bound=Hashable)


class Growth:
    """By how much the storages of each size, and all of them, became more in every one of the steps.

    Args:
        census: storages of each size that were alive after each step; no growth is told from fewer than
            FEWEST_STEPS + 1 of them.
    """

    def __init__(self, census: Sequence[Mapping[int, int]]) -> None:
        self._census = census if len(census) > FEWEST_STEPS else ()
        self._whole = self._steady([sum(counts.values()) for counts in self._census])

    def of(self, left: Mapping[Key, Sequence[int]]) -> set[Key]:
        """Which of the groups of storages that the last step left behind it leaves behind in every step.

        A group whose sizes each become more by as many as it has grows. One whose sizes differ from step to step does
        where the number of all storages becomes more by as many beyond that.
        """
        growing, rest = set(), self._whole
        for key, sizes in left.items():
            if all(self._of_size(size) >= count for size, count in Counter(sizes).items()):
                growing.add(key)
                rest -= len(sizes)
        return growing | {key for key, sizes in left.items() if key not in growing and self._varies(sizes, rest)}

    def _varies(self, sizes: Sequence[int], rest: int) -> bool:
        """Check that a step before left none of these sizes, and that ``rest`` more storages account for them."""
        new = len(self._census) > 0 and all(not self._census[0].get(size) for size in sizes)
        return new and rest >= len(sizes)

    def _of_size(self, size: int) -> int:
        return self._steady([counts.get(size, 0) for counts in self._census])

    def _steady(self, counts: Sequence[int]) -> int:
        return min((later - earlier for earlier, later in pairwise(counts)), default=0)
