"""A row in a profiler's trace for each kernel that Inductor compiles for the CPU.

Its own setting for that (``cpp.enable_kernel_profile``) adds a header to each kernel's code, which then takes a third
longer to compile and is not what the program's cache has. From Python the same row costs nothing but itself: generated
code finds its kernels among its module's names.

Source: torch/_inductor/codegen/wrapper.py (the names), codecache.py (``CppPythonBindingsCodeCache``: what they stand
for), as of torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch

from gradscope.compat.dynamo.left_alone import keep_eager
from gradscope.compat.profilers import end_range, open_range

_KERNEL = "cpp_"  # what names of kernels begin with


class KernelRows:
    """Kernels that write a row while a profiler runs, until :meth:`take_out`."""

    def __init__(self) -> None:
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []  # where, its name, the kernel and what is there

    def put_in(self, function: Any) -> None:
        """Have the kernels write rows that the code of a compiled graph calls.

        Args:
            function: what runs it; generated for Python, for others nothing is done.
        """
        names: dict[str, Any] = getattr(function, "__globals__", {})
        for name, kernel in tuple(names.items()):
            if name.startswith(_KERNEL) and type(kernel) is BuiltinFunctionType:
                called = _with_row(kernel, name)
                self._changed.append((names, name, kernel, called))  # first: a signal's handler may raise
                names[name] = called

    def take_out(self) -> None:
        """Put all back as it was."""
        for names, name, kernel, called in self._changed:
            if names.get(name) is called:
                names[name] = kernel
        self._changed = []


def _with_row(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not torch.autograd.profiler._is_profiler_enabled:
            return kernel(*args)
        row = open_range(name)
        try:
            return kernel(*args)
        finally:
            end_range(row)

    keep_eager(call)
    return call
