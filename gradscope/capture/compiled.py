"""Whether torch.compile is at work."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from gradscope.capture.byhand import unwrapped


def uses_compile(modules: Iterable[nn.Module], compiled_before: int) -> bool:
    """Whether compiled code ran in these steps: compiled modules, compiled functions in reach, or a new compilation."""
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


def _is_compiled(value: Any) -> bool:
    try:
        # Not getattr: a global of the user's may compute something, or raise, when it is asked for an attribute.
        return "_torchdynamo_orig_callable" in object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return False


def _globals_of(module: nn.Module) -> list[Any]:
    function = unwrapped(inspect.getattr_static(type(module), "forward", None))
    return list(getattr(function, "__globals__", {}).values())
