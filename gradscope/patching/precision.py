"""The user's own code in float64, unedited: the truth that an original and its replacement are both measured against.

``deepcopy(module).double()`` is no truth: closures keep the old modules, and code names float32. Here every torch call
is given its floating tensors as float64, and every float type it is told becomes float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_REAL = frozenset({torch.float32, torch.float16, torch.bfloat16})
_COMPLEX = frozenset({torch.complex64, torch.complex32})

_CASTS: frozenset[Callable[..., Any]] = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Runs what is inside in float64.

    Args:
        leaves: tensors that gradients are wanted for, or that are read; each is replaced by a float64 copy, see
            :meth:`double_of`.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        super().__init__()
        self._doubles = {
            id(leaf): (leaf, leaf.detach().double().requires_grad_(leaf.requires_grad))
            for leaf in leaves
            if leaf.dtype in _REAL
        }

    def double_of(self, leaf: Tensor) -> Tensor:
        """The copy that stands for ``leaf``, or the leaf itself where it is float64 already."""
        found = self._doubles.get(id(leaf))
        return leaf if found is None else found[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            func, args = Tensor.double, args[:1]
        return func(*self._lifted(args), **self._lifted(kwargs or {}))

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = self._doubles.get(id(value))
            if found is not None and found[0] is value:
                return found[1]
            if value.dtype in _REAL:
                return value.double()
            return value.to(torch.complex128) if value.dtype in _COMPLEX else value
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _REAL else torch.complex128 if value in _COMPLEX else value
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self._lifted(each) for each in value) if type(value) is tuple else value
        if type(value) is list:
            return [self._lifted(each) for each in value]
        if type(value) is dict:
            return {name: self._lifted(each) for name, each in value.items()}
        return value


class WithoutDropout(TorchFunctionMode):
    """Dropout drops nothing: what is compared is all that does not depend on random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and name != "native_dropout" and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
