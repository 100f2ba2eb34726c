"""Where torch's operations run in place of a recipe's own code, whichever recipe it is: one rule for all of them.

A recipe's code is an autograd Function over loops, writes into buffers of its own and looks at values. That is right
for dense tensors that hold numbers. torch.func transforms, forward-mode derivatives, tracers and tensors of another
kind need operations that they know how to treat: there every recipe is the composition of torch's that it replaces.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from gradscope.compat import dispatch_depth, dispatch_modes, exports, tracing_state, transform_running

_PLAIN = (Tensor, nn.Parameter)
_NO_TENSORS = frozenset({int, float, bool, str, type(None)})
_STRIDED = torch.strided


def why_torch(values: Collection[Any]) -> str | None:
    """Why torch's operations must run for these arguments, in words; None where a recipe's own code can.

    Under ``torch.compile`` None: what the compiler may not see into is an operator there. Takes about 1 µs.

    Args:
        values: of any types; tensors also in tuples. Other values are not looked at.
    """
    if torch.compiler.is_compiling():
        return "torch.export is tracing" if exports() else None
    if derives() or dispatch_depth() or tracing_state() is not None:
        why = _why_now()
        if why is not None:
            return why
    return _why_of(values, values)


def _why_of(values: Collection[Any], given: Collection[Any]) -> str | None:
    """Why torch's operations must run for tensors of these kinds: all that are ``given``, or a tuple among them."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if value.layout is not _STRIDED or value.is_nested:
                return _why_kind(value)
            if value.is_meta and _all_meta(given):
                return "the tensors are on the meta device"  # beside others it is an error, that the recipe names
        elif kind is tuple:
            why = _why_of(value, given)
            if why is not None:
                return why
        elif kind not in _NO_TENSORS and isinstance(value, Tensor):
            return _why_kind(value)
    return None


def _all_meta(values: Collection[Any]) -> bool:
    return all(
        _all_meta(each) if isinstance(each, tuple) else each.is_meta
        for each in values
        if isinstance(each, (Tensor, tuple))
    )


def _why_now() -> str | None:
    """Why torch's operations must run now, whatever the arguments are."""
    if transform_running() is not None:
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    if any(mode.is_infra_mode() for mode in dispatch_modes()):  # a user's mode looks on
        return "torch is tracing, or running without data"
    return None if tracing_state() is None else "torch.jit is tracing"


def derives() -> bool:
    """Check that a transform of torch.func runs, or forward-mode derivatives are taken."""
    return transform_running() is not None or forward_ad._current_level >= 0


def is_wrapped(tensor: Tensor) -> bool:
    """Check that the tensor is of a subclass that does more than to stand for a tensor while torch traces."""
    return type(tensor) not in (*_PLAIN, FakeTensor) and not torch.compiler.is_compiling()


def _why_kind(tensor: Tensor) -> str:
    if type(tensor) not in _PLAIN:
        return f"a tensor is a {type(tensor).__name__}"
    if tensor.is_nested:
        return "a tensor is nested"
    return f"a tensor's layout is {str(tensor.layout).removeprefix('torch.')}"
