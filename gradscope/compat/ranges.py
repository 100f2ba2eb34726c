"""Rows of the profiler's trace that somebody opens, and that must be ended before their profiler stops."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

from gradscope.compat.private import private

_RecordFunctionFast: Any = private("torch._C._profiler._RecordFunctionFast")


_open_markers: set[Any] = set()  # of all threads


def open_range(name: str) -> Any:
    """Open a row of that name in a running profiler's trace, at less than 1 µs; give it to :func:`end_range`.

    One that is open, on any thread, when gradscope's profiler stops is ended before: it would write through a pointer
    into what the profiler recorded. A thread may be inside a module's call then, and an error may keep a frame alive.
    """
    opened = _RecordFunctionFast(name)
    opened.__enter__()
    _open_markers.add(opened)
    return opened


def end_range(opened: Any) -> None:
    """End a row; nothing where its profiler has stopped."""
    try:
        _open_markers.remove(opened)
    except KeyError:  # its profiler has stopped
        return
    try:
        opened.__exit__(None, None, None)
    except RuntimeError:  # the profiler has started since it was entered: there is no row to end
        return


class TraceMarker:
    """``with TraceMarker(name):`` puts one row into a running profiler's trace."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = open_range(self._name)

    def __exit__(self, *exc: object) -> None:
        end_range(self._range)


def end_open_markers() -> None:
    with contextlib.suppress(KeyError):  # another thread has just ended the last one
        while _open_markers:
            with contextlib.suppress(RuntimeError):
                _open_markers.pop().__exit__(None, None, None)


class _UsersRanges:
    """The ``record_function`` ranges that were entered since one of gradscope's profilers started.

    A range that outlives its profiler holds a pointer into what that recorded, which it would write through when it
    ends. Ending it twice does nothing.
    """

    def __init__(self) -> None:
        self._entered: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original: Any = None
        self._enter: Any = None

    def watch(self) -> None:
        kind: Any = torch.autograd.profiler.record_function
        original, entered = kind.__enter__, self._entered

        @functools.wraps(original)  # torch.jit reads the source of what it finds here
        def enter(self: Any) -> Any:
            result = original(self)
            entered.add(self)
            return result

        kind.__enter__ = enter
        self._original, self._enter = original, enter

    def end(self) -> None:
        """End those that are open, and watch no more."""
        kind: Any = torch.autograd.profiler.record_function
        if self._enter is not None and kind.__enter__ is self._enter:
            kind.__enter__ = self._original
        self._enter = None
        entered = list(self._entered)
        self._entered.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for each in entered:
                if each.record is not None:
                    torch.ops.profiler._record_function_exit._RecordFunction(each.record)


users_ranges = _UsersRanges()
