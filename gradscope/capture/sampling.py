"""At which lines a loop spends its time between the phases: a look at the stack every millisecond, while it warms up.

No step is measured meanwhile. A look needs the interpreter's lock, which Python code hands over every 5 ms only: each
look stands for the time since the one before.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from typing import Any

from gradscope.capture.guard import Guard
from gradscope.capture.paths import local_path
from gradscope.capture.user_stack import OURS, TORCH, is_users, stack

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
        """End, and wait for it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

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
        elif name.startswith(TORCH) or (found is None and name.startswith(OURS) and not name.endswith("loading.py")):
            return None
        elif found is None and is_users(name):
            found = name, each.f_lineno
    return None if found is None else (*found, loading)
