"""Where a training loop spends its time between the phases: DataLoader waits, and samples of the stack.

No step is measured meanwhile. A look needs the interpreter's lock, which Python code hands over every 5 ms only: each
look stands for the time since the one before.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, dataloader

from gradscope.capture.callers import OURS, TORCH, is_users, line_of, stack
from gradscope.capture.guard import Guard
from gradscope.capture.registry import local_path

DATA_LOADING = "timing data loading"  # under which the guard notes an error

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
        # Somebody who replaced ours in the meantime keeps what they set; ours, if that calls it, counts nothing then.
        if vars(owner).get(name) is wrapper:
            setattr(owner, name, original)


_PERIOD_S = 0.001
_MOST = 5  # lines
_LOADING = f"{TORCH}utils/data/"
_DECORATOR = f"{TORCH}utils/_contextlib.py"  # @torch.no_grad() on a function of the user's


class LineSampler:
    """Looks at the thread that made it, from :meth:`start` to :meth:`stop`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._watched = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ns: defaultdict[tuple[str, int, bool], int] = defaultdict(int)

    def start(self) -> None:
        """Begin, where it has not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradscope lines", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, and wait for it; it may begin again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self._stop.clear()

    def facts(self) -> list[dict[str, Any]]:
        """The lines where most time was spent: ``line``, "train.py:12"; ``share`` of the time between the phases;
        ``loading``: whether a DataLoader called it."""
        whole = max(sum(self._ns.values()), 1)
        ordered = sorted(self._ns.items(), key=lambda item: -item[1])[:_MOST]
        return [
            {"line": f"{local_path(file)}:{line}", "share": ns / whole, "loading": loading}
            for (file, line, loading), ns in ordered
        ]

    def _run(self) -> None:
        with self._guard.over("sampling lines"):
            self._sample()

    def _sample(self) -> None:
        last = time.perf_counter_ns()
        while not self._stop.wait(_PERIOD_S):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter_ns()
            place = _place(frame)
            del frame
            if place is not None:
                self._ns[place] += now - last
            last = now


def _place(frame: Any) -> tuple[str, int, bool] | None:
    """The line of the user's, and whether a DataLoader called it; None inside torch, and so inside of a phase."""
    found: tuple[str, int] | None = None
    loading = False
    for each in stack(frame):
        name = each.f_code.co_filename
        if name.startswith(_LOADING):
            loading = True
        elif name == _DECORATOR:
            continue
        elif name.startswith(TORCH) or (found is None and name.startswith(OURS) and name != __file__):
            return None
        elif found is None and is_users(name):
            found = name, each.f_lineno
    return None if found is None else (*found, loading)
