"""Room for files of gradscope's own where the user's code has opened as many as it may.

Data loaders that leak descriptors run into the soft limit in the middle of training. gradscope loads parts of torch and
of its own then, and writes files at the end: for as long as that takes the limit is raised, towards the hard one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
