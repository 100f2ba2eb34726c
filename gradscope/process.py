"""What gradscope asks of its process: room for open files, an end for forked children, warnings left out.

Data loaders that leak descriptors run into the soft limit in the middle of training. gradscope loads parts of torch and
of its own then, and writes files at the end: for as long as that takes the limit is raised, towards the hard one.

Kineto keeps a thread of its own from its first start on. A fork has no such thread, but it has what the thread waited
on, and the destructor of that waits for it: a child that ends by itself, not by ``os._exit``, never would (torch 2.13).

``warnings.catch_warnings`` and ``filterwarnings`` make it forget: every warning of the user's that is shown once a
place would come again, once for each time that gradscope did so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

resource: Any
try:
    import resource
except ImportError:  # not on Windows, which has no such limit
    resource = None

_MORE = 64


@contextlib.contextmanager
def room_for_files() -> Iterator[None]:
    """Let the process have a few more files open until the block is left, where the hard limit allows it."""
    if resource is None:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft + _MORE if hard == resource.RLIM_INFINITY else min(soft + _MORE, hard)
    if soft == resource.RLIM_INFINITY or not _set(most, hard):
        yield
        return
    try:
        yield
    finally:
        # Code of the user's that set a limit of its own in the meantime keeps that.
        if resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard):
            _set(*before)


def _set(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


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


@contextmanager
def unheard(message: str = "", *, module: str = "") -> Iterator[None]:
    """Ignore warnings whose text, and whose module, begin like these regular expressions, until the block is left."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    entry = ("ignore", re.compile(message, re.IGNORECASE), Warning, re.compile(module), 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        # The user's code may have put other filters in their place meanwhile.
        for each in (filters, warnings.filters):
            with suppress(ValueError):
                each.remove(entry)  # type: ignore[union-attr]
