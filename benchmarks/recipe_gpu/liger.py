"""Liger Kernel's functions, where it is installed; it is no dependency of anything here."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from recipe_gpu.problem import Kind, Way


@functools.cache
def why_not() -> str | None:
    """Why Liger-Kernel cannot be used, in words; None where it can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "not installed"
    try:
        importlib.import_module("liger_kernel.transformers.functional")
    except Exception as error:  # of any kind: it imports much, for versions of torch that may not be this one
        return f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0][:90]
    return None


def version() -> str | None:
    """The package's version; None where it is not installed."""
    try:
        return importlib.metadata.version("liger_kernel")
    except importlib.metadata.PackageNotFoundError:
        return None


def ways(name: str, call: Callable[[Callable[..., Any]], Callable[..., Any]], *, goal: bool = True) -> tuple[Way, ...]:
    """The way through one of its functions; none where it cannot be used.

    Args:
        name: of the function in ``liger_kernel.transformers.functional``.
        call: makes of that function one of the problem's inputs.
        goal: see :class:`recipe_gpu.problem.Way`.
    """
    if why_not() is not None:
        return ()
    function = getattr(importlib.import_module("liger_kernel.transformers.functional"), name, None)
    if function is None:
        return ()
    return (Way("Liger", Kind.LIGER, call(function), overwrites=True, goal=goal),)
