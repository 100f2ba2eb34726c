"""Whether ``fix --write`` may be refused, told from the files that could change before anything is measured.

Which files do change is known once a step was recorded, seconds into the run; that step is taken ahead of the profile,
which takes minutes, only where one of the files here would be refused.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from gradscope.errors import OutputError
from gradscope.fixing.report import Edited
from gradscope.patching.edit.source import decoded
from gradscope.tree import modules_of

Check = Callable[[Sequence[Edited]], None]
_TORCH = Path(torch.__file__).resolve().parent


def may_refuse(check: Check, names: Iterable[str], folder: Path) -> bool:
    """Return whether ``check`` refuses one of ``names``, or of the uncommitted files of the repository at ``folder``.

    These too, because helpers that a forward calls may stand in any file of the project.
    """
    return any(_refused(check, name) for name in dict.fromkeys((*names, *_uncommitted(folder))))


def files_of_forwards(model: nn.Module) -> set[str]:
    """Return the files that the forwards of the model's modules stand in, without torch's own."""
    codes = [getattr(getattr(type(module), "forward", None), "__code__", None) for module in modules_of(model)]
    names = {code.co_filename for code in codes if code is not None}
    return {name for name in names if not Path(name).resolve().is_relative_to(_TORCH)}


def _refused(check: Check, name: str) -> bool:
    try:
        text = decoded(Path(name).read_bytes())[0].replace("\r\n", "\n")
    except (OSError, ValueError, SyntaxError):  # no file, as of code that was made by exec; or not readable as Python
        return False
    try:
        check([Edited(name, text, text)])
    except OutputError:
        return True
    return False


def _uncommitted(folder: Path) -> Iterator[str]:
    """Paths of the Python files that have changes which git does not hold, in the repository around ``folder``."""
    root = _git(folder, "rev-parse", "--show-toplevel").strip()
    if root:
        for entry in _git(folder, "status", "--porcelain", "-z", "--", ":/*.py").split("\0"):
            yield str(Path(root, entry[3:]))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)  # noqa: S603, S607
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""
    return done.stdout
