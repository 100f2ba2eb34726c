"""Frames of the interpreter: whose they are, and where they stand."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")

# Where the interpreter's own modules are, as logging; below some of these also what is installed.
_STANDARD = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_skipped(frame: FrameType) -> bool:
    """Whether it is torch's or gradscope's own."""
    return frame.f_code.co_filename.startswith(_SKIPPED)


def above_logging(innermost: FrameType) -> FrameType:
    """The frame that logs, where a handler of whatever origin reads the tensor."""
    found = innermost
    for frame in stack(innermost):
        if frame.f_code.co_filename == logging.__file__ and frame.f_back is not None:
            found = frame.f_back
    return found


def is_standard(frame: FrameType) -> bool:
    """Whether it is of the interpreter's own modules."""
    name = frame.f_code.co_filename
    return name.startswith(_STANDARD) and not any(part in name for part in _INSTALLED)
