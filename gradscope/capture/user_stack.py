"""Which frames of a stack are the user's."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

import gradscope

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(gradscope.__file__).parent}/"
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_GENERATED = "<eval_with_key>"  # what torch.fx writes in memory, under another number in every run
_INSTALLED = ("/site-packages/", "/dist-packages/")


def is_standard(filename: str) -> bool:
    """Check that the file is the interpreter's own, or the name of code that torch has written in memory."""
    if filename.startswith(_GENERATED):
        return True
    return filename.startswith(("<frozen ", *_STANDARD)) and not any(part in filename for part in _INSTALLED)


def is_users(filename: str) -> bool:
    """Check that the user can edit the file: it is neither installed, nor the interpreter's, nor gradscope's."""
    if filename.startswith((TORCH, OURS)) or is_standard(filename):
        return False
    return not any(part in filename for part in _INSTALLED)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost one on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's."""
    for each in stack(frame):
        if is_users(each.f_code.co_filename):
            return each.f_code.co_filename, each.f_lineno
    return None
