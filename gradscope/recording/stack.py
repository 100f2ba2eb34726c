"""Frames of the interpreter, as a recording looks at them."""

from __future__ import annotations

import logging
from types import FrameType

from gradscope.capture.callers import OURS, TORCH, stack


def is_skipped(frame: FrameType) -> bool:
    """Return whether it is torch's or gradscope's own."""
    return frame.f_code.co_filename.startswith((TORCH, OURS))


def above_logging(innermost: FrameType) -> FrameType:
    """The frame that logs, where a handler of whatever origin reads the tensor."""
    found = innermost
    for frame in stack(innermost):
        if frame.f_code.co_filename == logging.__file__ and frame.f_back is not None:
            found = frame.f_back
    return found
