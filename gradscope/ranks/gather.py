"""The first rank waits for what the others of its machine write, and reads all of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gradscope.errors import GradscopeError
from gradscope.ranks.merged import Merged, merge

SECONDS = 30.0  # all ranks end together; analysing a trace of a million events takes some seconds
_BETWEEN = 0.05


def gathered(
    paths: Sequence[Path],
    since: float,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Merged | None, list[Path]]:
    """What the ranks wrote, and the files that did not come.

    Args:
        paths: a file for each rank.
        since: files older than that, as ``time.time`` counts, are of another run.
        seconds: how long to wait for all.
    """
    end = clock() + seconds
    missing = list(paths)
    while True:
        missing = [path for path in missing if not _is_new(path, since)]
        awaited = [path for path in missing if not _is_new(_nothing(path), since)]
        if not awaited or clock() >= end:
            break
        time.sleep(_BETWEEN)
    for path in missing:
        _nothing(path).unlink(missing_ok=True)
    there = [path for path in paths if path not in missing]
    merged = None
    if len(there) > 1:
        with suppress(GradscopeError):  # each rank has its own report all the same
            merged = merge(there)
    return merged, missing


def nothing_comes(path: Path) -> None:
    """Let the first rank know that this one's file will not come: it has nothing to report."""
    with suppress(OSError):
        _nothing(path).touch()


def _nothing(path: Path) -> Path:
    """A file that stands for one that does not come; not beside it, for nobody may look at it later."""
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"gradscope-{os.getuid()}-{name}.nothing"


def _is_new(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since
    except OSError:
        return False
