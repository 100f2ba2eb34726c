"""What every test gets: a check that it left torch, the process and the repository as they were."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

REPOSITORY = Path(__file__).parent.parent
_OPTIMIZER: Any = sys.modules[torch.optim.Optimizer.__module__]


def _hooks() -> dict[str, int]:
    modules: Any = torch.nn.modules.module
    found = {name: len(value) for name, value in vars(modules).items() if name.startswith("_global_") and value}
    found |= {name: len(value) for name, value in vars(_OPTIMIZER).items() if name.startswith("_global_") and value}
    return found


def _process() -> dict[str, Any]:
    autograd: Any = torch.autograd
    return {
        "global hooks": _hooks(),
        "engine entry": autograd._engine_run_backward,
        "Function.apply": torch.autograd.Function.__dict__["apply"],
        "recompute hook": torch.utils.checkpoint._recomputation_hook,
        "function mode": _get_current_function_mode(),
        "dispatch mode": _get_current_dispatch_mode(),
        "grad mode": torch.is_grad_enabled(),
        "argv": list(sys.argv),
        "path": list(sys.path),
        "__main__": sys.modules["__main__"],
        "working folder": os.getcwd(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a hook, a patch, a mode, a thread, or a file in the repository's top folder."""
    before, threads = _process(), set(threading.enumerate())
    files = set(os.listdir(REPOSITORY))
    yield
    after = _process()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"left changed: {changed}"
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"threads left running: {left}"
    made = set(os.listdir(REPOSITORY)) - files - {"__pycache__", ".pytest_cache"}
    assert not made, f"files left in the repository: {made}"
