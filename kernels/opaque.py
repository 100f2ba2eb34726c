"""Functions that torch.compile calls as they are, instead of tracing into them.

A chunked loop over data, an in-place write into a buffer of our own or a check of values would break the graph or be
rewritten. As a custom operator it is one node of the graph. In eager mode the operator's dispatch costs some 20 µs a
call for nothing, so there the function is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(name: str, fake: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function one node of a compiled graph.

    The function may neither return nor write to one of its arguments, and its annotations must be types that
    ``torch.library.infer_schema`` knows.

    Args:
        name: of the operator, below ``gradscope::``.
        fake: the same signature; returns tensors of the shape, dtype, device and strides of the real result.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        operator = torch.library.custom_op(f"gradscope::{name}", function, mutates_args=())
        operator.register_fake(fake)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return cast(R, operator(*args, **kwargs))
            return function(*args, **kwargs)

        call.__doc__ = function.__doc__
        call.__name__ = function.__name__
        return call

    return register
