"""How long a loop waits for the batches of a DataLoader, and how that DataLoader is set."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, dataloader

from gradscope.capture.guard import Guard
from gradscope.capture.paths import local_path
from gradscope.capture.user_stack import line_of

DATA_LOADING = "timing the data loading"  # under which the guard notes an error

_Key = tuple[str, str, int, bool, bool]


@dataclass
class _Waited:
    """Of one DataLoader at one line."""

    ns: int = 0
    start_ns: int = 0  # making its iterator, and with it its workers


class LoaderWatch:
    """Measures the calls for the next batch on the thread that trains, while :attr:`counting`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.counting = False
        self._thread = threading.get_ident()
        self._found: dict[_Key, _Waited] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch every DataLoader until the block is left."""
        iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
        with _wrapped(iterator, "__next__", self._next), _wrapped(DataLoader, "__iter__", self._iter):
            yield

    def facts(self, steps: int) -> list[dict[str, Any]]:
        """One for each, those that were waited for longest first; times are of one of so many steps.

        ``line``: of the loop, "train.py:12", or None; ``dataset``: its class; ``workers``; ``persistent``;
        ``pinned``; ``ns``: until the next batch is there; ``start_ns``: until the workers are.
        """
        steps = max(steps, 1)
        ordered = sorted(self._found.items(), key=lambda item: -item[1].ns)
        return [
            {
                "line": line or None,
                "dataset": dataset,
                "workers": workers,
                "persistent": persistent,
                "pinned": pinned,
                "ns": waited.ns // steps,
                "start_ns": waited.start_ns // steps,
            }
            for (line, dataset, workers, persistent, pinned), waited in ordered
        ]

    def _next(self, original: Callable[[Any], Any], iterator: Any, frame: FrameType) -> Any:
        if not self.counting or threading.get_ident() != self._thread:
            return original(iterator)
        start = time.perf_counter_ns()
        try:
            return original(iterator)
        finally:
            with self._guard.over(DATA_LOADING):
                self._waited(iterator, frame).ns += time.perf_counter_ns() - start

    def _iter(self, original: Callable[[Any], Any], loader: Any, frame: FrameType) -> Any:
        if not self.counting or threading.get_ident() != self._thread:
            return original(loader)
        start = time.perf_counter_ns()
        iterator = original(loader)
        with self._guard.over(DATA_LOADING):
            self._waited(iterator, frame).start_ns += time.perf_counter_ns() - start
        return iterator

    def _waited(self, iterator: Any, frame: FrameType) -> _Waited:
        place = line_of(frame)
        key = (
            f"{local_path(place[0])}:{place[1]}" if place is not None else "",
            type(getattr(iterator, "_dataset", None)).__name__,
            int(getattr(iterator, "_num_workers", 0)),
            bool(getattr(iterator, "_persistent_workers", False)),
            bool(getattr(iterator, "_pin_memory", False)),
        )
        return self._found.setdefault(key, _Waited())


@contextmanager
def _wrapped(owner: Any, name: str, around: Callable[[Callable[[Any], Any], Any, FrameType], Any]) -> Iterator[None]:
    original = vars(owner).get(name) if owner is not None else None
    if original is None:  # another torch: nothing is known of its loaders then
        yield
        return

    def wrapper(self: Any) -> Any:
        return around(original, self, sys._getframe(1))

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
