"""Objects of the user's, numbered as they are seen, and none of them kept alive for that.

A step may make modules and leaves of its own: a head that is replaced, a copy, the points of a gradient penalty. Held
here they would live on, and count in the memory that is measured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Seen(Generic[T]):
    """Numbers objects in the order in which they are first seen; iterates over those that are alive.

    Objects are told apart by identity. An address is used again once an object is gone: what lies there then is
    another object, with a number of its own.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references: list[weakref.ref[T]] = []
        self._numbers: dict[int, int] = {}  # by id; of the latest object there
        self._lock = threading.Lock()
        self._held: list[T] = []
        for item in items:
            self.number(item)

    def number(self, item: T) -> int:
        """The number of ``item``, a new one where it was not seen before."""
        number = self._numbers.get(id(item))
        if number is not None and self._references[number]() is item:
            return number
        with self._lock:
            number = self._numbers.get(id(item))  # another thread may have been faster
            if number is None or self._references[number]() is not item:
                number = len(self._references)
                self._references.append(weakref.ref(item))
                self._numbers[id(item)] = number
            return number

    def __getitem__(self, number: int) -> T | None:
        """The object of that number; None where it is gone."""
        return self._references[number]()

    def __len__(self) -> int:
        """How many were seen."""
        return len(self._references)

    def __iter__(self) -> Iterator[T]:
        """Those that are alive, in the order of their numbers."""
        return (item for item in self.by_number() if item is not None)

    def by_number(self) -> list[T | None]:
        """All that were seen; None for each that is gone."""
        return [reference() for reference in self._references]

    def hold(self) -> None:
        """Keep what is alive now: nothing is measured any more, and the report needs their names.

        A script's function may be left, and with it its model, before the report is made.
        """
        self._held = list(self)

    def clear(self) -> None:
        """Forget all."""
        self._references.clear()
        self._numbers.clear()
        self._held.clear()
