"""Whether steps run compiled code, and what torch.compile made as the user wrote it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradscope.capture.modules import no_compile_warning
from gradscope.compat import DYNAMO, compiled_frames, is_compiled, is_compiled_module, once_imported


def uses_compile(modules: Iterable[nn.Module], compiled_before: int) -> bool:
    """Check that compiled code ran in these steps: compiled modules, compiled functions in reach, or a compilation."""
    if compiled_frames() > compiled_before:
        return True
    return any(
        is_compiled_module(module) or any(is_compiled(value) for value in _globals_of(module)) for module in modules
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile made runs as the user wrote it, and nothing is compiled, until the block is left.

    A mode of ours around compiled code would be compiled into it.
    """
    if DYNAMO not in sys.modules:  # then nothing was compiled, and to ask for this would load all of it
        yield
        return
    with torch.compiler.set_stance("force_eager"), no_compile_warning():
        yield


@contextmanager
def never_compiled() -> Iterator[None]:
    """:func:`uncompiled` around a whole program, which may have yet to import Dynamo."""
    with ExitStack() as eager, once_imported(DYNAMO, lambda: eager.enter_context(uncompiled())):
        yield


def _globals_of(module: nn.Module) -> list[Any]:
    function = inspect.getattr_static(type(module), "forward", None)
    return list(getattr(function, "__globals__", {}).values())
