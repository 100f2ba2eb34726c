"""Tells that torch.compile is at work, and does without it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from gradscope.capture.byhand import unwrapped
from gradscope.capture.modules import no_compile_warning
from gradscope.capture.user_stack import stack


def uses_compile(modules: Iterable[nn.Module], compiled_before: int) -> bool:
    """Check that compiled code ran in these steps: compiled modules, compiled functions in reach, or a compilation."""
    if compiled_frames() > compiled_before:
        return True
    return any(
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or any(_is_compiled(value) for value in _globals_of(module))
        for module in modules
    )


def compiled_frames() -> int:
    """Frames that Dynamo has looked at so far; 0 where it was never loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile made runs as the user wrote it, and nothing is compiled, until the block is left.

    A mode of ours around compiled code would be compiled into it.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and to ask for this would load all of it
        yield
        return
    with torch.compiler.set_stance("force_eager"), no_compile_warning():
        yield


def under_compile(innermost: FrameType) -> bool:
    """Check that the frame was called by something that torch.compile made, also inside :func:`uncompiled`."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", None)
    if kind is None:
        return False
    wrappers = {id(each) for each in kind.__call__.__code__.co_consts}  # what it puts around a function
    return any(id(frame.f_code) in wrappers for frame in stack(innermost))


def _is_compiled(value: Any) -> bool:
    try:
        # Not getattr: a global of the user's may compute something, or raise, when it is asked for an attribute.
        return "_torchdynamo_orig_callable" in object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return False


def _globals_of(module: nn.Module) -> list[Any]:
    function = unwrapped(inspect.getattr_static(type(module), "forward", None))
    return list(getattr(function, "__globals__", {}).values())
