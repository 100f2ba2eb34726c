"""The user's own code in float64, unedited: the truth that an original and its replacement are both measured against.

``deepcopy(module).double()`` is no truth: closures keep the old modules, and code names float32. Here every torch call
is given its floating tensors as float64, and every float type it is told becomes float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscope.compat import swap_engine_entry

_REAL = frozenset({torch.float32, torch.float16, torch.bfloat16})
_COMPLEX = frozenset({torch.complex64, torch.complex32})

# Random numbers of float64 are others than those of float32 from the same seed.
_DRAWS = frozenset({"rand", "randn", "rand_like", "randn_like", "normal"})
_DRAWS_IN_PLACE = frozenset(
    {"uniform_", "normal_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_", "random_"}
)

_CASTS: frozenset[Callable[..., Any]] = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Runs what is inside in float64.

    What is made without a type, a parameter of a module that is made in each call for one, is float64 at once: a copy
    of it in each call would be no leaf, and would lose what is written into it. Random numbers are drawn as without
    this mode, and then made float64.

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

        self._default = torch.get_default_dtype()
        self._before: list[torch.dtype] = []  # the default types to go back to: it may be entered in itself

    def __enter__(self) -> Self:
        self._before.append(torch.get_default_dtype())
        if self._before[-1] in _REAL:
            self._default = self._before[-1]
            torch.set_default_dtype(torch.float64)
        return cast("Self", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        torch.set_default_dtype(self._before.pop())
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def double_of(self, leaf: Tensor) -> Tensor:
        """The copy that stands for ``leaf``, or the leaf itself where it is float64 already."""
        found = self._doubles.get(id(leaf))
        return leaf if found is None else found[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            func, args = Tensor.double, args[:1]
        args, kwargs = self._lifted(args), self._lifted(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DRAWS:
            return self._drawn(func, args, kwargs)
        if name in _DRAWS_IN_PLACE or getattr(func, "__module__", "") == "torch.nn.init":
            return self._drawn_into(func, args, kwargs)
        return func(*args, **kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` draws in the type that it has without this mode, as float64."""
        if self._default not in _REAL:
            return func(*args, **kwargs)
        args = tuple(self._lowered(each) for each in args)
        kwargs = {key: self._lowered(each) for key, each in kwargs.items()}
        if not any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            kwargs["dtype"] = self._default
        drawn = func(*args, **kwargs)
        return drawn.detach().double().requires_grad_(drawn.requires_grad)

    def _lowered(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return value.detach().to(self._default)
        return self._default if value == torch.float64 and isinstance(value, torch.dtype) else value

    def _drawn_into(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The same for what is drawn into a tensor that is there: its first argument, or called "tensor"."""
        whole = args[0] if args else kwargs.get("tensor")
        if self._default not in _REAL or not isinstance(whole, Tensor) or whole.dtype != torch.float64:
            return func(*args, **kwargs)
        drawn = whole.detach().to(self._default)
        if args:
            func(drawn, *args[1:], **kwargs)
        else:
            func(**(kwargs | {"tensor": drawn}))
        if getattr(func, "__module__", "") == "torch.nn.init":
            with torch.no_grad():
                return whole.copy_(drawn)
        return whole.copy_(drawn)

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._doubles:  # the leaves are held, so that no other tensor has their ids
                return self.double_of(value)
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


@contextmanager
def in_backward(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """The modes are on inside each backward pass too, where checkpointing runs a part of forward again.

    ``backward`` is itself a torch function, so that they are off there.
    """

    def wrapped(run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return run_backward(*args, **kwargs)

        return run

    with swap_engine_entry(wrapped):
        yield


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
