"""Lets a process end that was forked after a profiler had run.

Kineto keeps a thread of its own from its first start on. A fork has no such thread, but it has what the thread waited
on, and the destructor of that waits for it: a child that ends by itself, not by ``os._exit``, never would (torch 2.13).
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_profiler_ran = False


def note_profiler() -> None:
    """A profiler starts in this process."""
    global _profiler_ran
    _profiler_ran = True


def _after_fork() -> None:
    """Let this process end without the destructors of C++, as those that ``multiprocessing`` forks do."""
    if not _profiler_ran:
        return
    with contextlib.suppress(OSError, AttributeError):  # only glibc tells functions of the exit code
        libc = ctypes.CDLL(None)
        libc.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        # Called last to first, without Python, which has ended by then: files of C are written, then the process ends.
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
