"""The frames of the user's on a stack, and the instructions that modules are called from."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

from gradscope.compat import wrapper_codes
from gradscope.tables import OF_TORCHS_LAYER
from gradscope.trampoline import is_made_here

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[1]}/"
_FOUND = [find_spec(f"gradscope.{name}") for name in ("recipes", "kernels")]
# What runs in the user's model in the place of the user's code; it lies elsewhere where gradscope is developed.
REPLACEMENTS = tuple(f"{Path(found.origin).parent}/" for found in _FOUND if found is not None and found.origin)
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
GENERATED = "<eval_with_key>"  # what torch.fx writes in memory, under another number in every run
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Another way to write torch's operations: all of a program's would be at a few lines of theirs.
_NOTATIONS = tuple(f"{folder}{name}/" for folder in _INSTALLED for name in ("einops", "opt_einsum"))


def is_standard(filename: str) -> bool:
    """Check that the file is the interpreter's own, or the name of code that torch has written in memory."""
    if filename.startswith(GENERATED):
        return True
    return filename.startswith(("<frozen ", *_STANDARD)) and not any(part in filename for part in _INSTALLED)


def is_users(filename: str) -> bool:
    """Check that the user can edit the file: it is neither installed, nor the interpreter's, nor gradscope's."""
    if filename.startswith((TORCH, OURS, *REPLACEMENTS)) or is_standard(filename):
        return False
    return not any(part in filename for part in _INSTALLED)


def is_notation(filename: str) -> bool:
    """Check that an installed library's file writes torch's operations another way: the line is its caller's."""
    return any(part in filename for part in _NOTATIONS)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost one on, but for those that tell of a call alone."""
    while frame is not None:
        if not is_made_here(frame.f_code):
            yield frame
        frame = frame.f_back


def compiled_by(innermost: FrameType) -> FrameType | None:
    """The nearest frame of what torch.compile made around a function, which may run it as it stands; None for none."""
    wrappers, frame = set(map(id, wrapper_codes())), cast("FrameType | None", innermost)
    while frame is not None and id(frame.f_code) not in wrappers:  # of each operation that is recorded
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's."""
    for each in stack(frame):
        if is_users(each.f_code.co_filename):
            return each.f_code.co_filename, each.f_lineno
    return None


UNKNOWN = -1  # no frame of the program's is below the call
_OFFSET_BITS = 32
_TORCHS_LAYERS = f"{TORCH}nn/"  # containers call layers at lines of their own
_TORCHS_CALL_FILE = nn.Module.__init__.__code__.co_filename


class Callers:
    """Numbers instructions; the same one has the same number in all steps of a run.

    An instruction is its code and the offset in it: its line would take longer to find, and may hold several calls.

    Attributes:
        first_of: by id of a code object the number of its first instruction, to which the offset is added. Only code
            that calls were seen to come from at the usual depth of the stack is in it: the quick way to their numbers.
    """

    def __init__(self) -> None:
        self.first_of: dict[int, int] = {}
        self._numbers: dict[int, int | None] = {}  # the same of all code; None: it only passes calls on
        self._equal: dict[tuple[Any, ...], int] = {}  # code that is made anew in each step is the same code
        self._kept: list[CodeType] = []  # so that no id is given twice
        self._lock = threading.Lock()

    def number(self, frame: FrameType | None, usual: int = -1) -> int:
        """Of the instruction that ``frame`` is at, or else the first frame around it that does not only pass it on.

        Args:
            usual: how many frames usually pass it on.
        """
        while frame is not None:
            code = frame.f_code
            first = self._numbers[id(code)] if id(code) in self._numbers else self._add(code)
            if first is not None:
                if usual == 0:
                    self.first_of[id(code)] = first
                return first + frame.f_lasti
            frame, usual = frame.f_back, usual - 1
        return UNKNOWN

    def _add(self, code: CodeType) -> int | None:
        if is_made_here(code):  # not kept: it leads to what it tells, and the collector does not look into code
            return None
        with self._lock:
            first = None
            if not _passes_on(code.co_filename):
                first = self._equal.setdefault(_key(code), len(self._equal) << _OFFSET_BITS)
                if code.co_filename.startswith(_TORCHS_LAYERS):
                    first |= OF_TORCHS_LAYER
            self._kept.append(code)
            self._numbers[id(code)] = first
            return first


def _key(code: CodeType) -> tuple[Any, ...]:
    """What tells code from other code: that itself cannot be hashed where a constant of it cannot, as in Dynamo's."""
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code, code.co_names


def _passes_on(filename: str) -> bool:
    """Check that a file's functions call modules for somebody else: checkpoints, wrappers, and the call itself."""
    if filename == _TORCHS_CALL_FILE or is_standard(filename):
        return True
    if filename.startswith(OURS):
        return not filename.startswith(REPLACEMENTS)
    return filename.startswith(TORCH) and not filename.startswith(_TORCHS_LAYERS)
