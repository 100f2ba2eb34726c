"""What a proof runs: one module on what it was given in the user's step, forward and backward, also in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradscope.capture.uncompiled import uncompiled
from gradscope.compat import swap_engine_entry
from gradscope.tree import buffers_of, named_parameters_of, parameters_of

Outcome = dict[str, Tensor]  # outputs and gradients by name

GRADIENT = "gradient of "


@dataclass(eq=False)
class Unit:
    """A call that can be repeated.

    Args:
        name: of what is called, for messages.
        module: whose parameters and buffers take part.
        call: runs it; gives its output.
        args, kwargs: what ``call`` is given, with every tensor as it was.
        seed: of the random numbers that the module and the upstream gradient draw.
    """

    name: str
    module: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int = 0

    @cached_property
    def references(self) -> tuple[Outcome, Outcome]:
        """Return what its own code gives, as it is and in float64."""
        return self.outcome(), self.outcome(double=True)

    def outcome(self, *, double: bool = False, gradients: bool = True) -> Outcome:
        """Run forward and backward from a random upstream gradient, without dropout: outputs and gradients.

        Args:
            double: in float64 throughout, see :class:`InDouble`.
            gradients: without them the outputs only.

        Raises:
            Exception: what the module raises.
        """
        args, kwargs = _fresh((self.args, self.kwargs))
        inputs = dict(_named_tensors("input", (args, kwargs)))
        leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        leaves |= {name: tensor for name, tensor in named_parameters_of(self.module) if tensor.requires_grad}
        read = [*parameters_of(self.module), *buffers_of(self.module), *inputs.values()]
        mode = InDouble(read) if double else None
        modes = [WithoutDropout()] if mode is None else [mode, WithoutDropout()]
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.enter_context(_seeded(self.seed))
            stack.enter_context(torch.enable_grad())
            for each in modes:
                stack.enter_context(each)
            if mode is not None:
                leaves = {name: mode.double_of(leaf) for name, leaf in leaves.items()}
            output = self.call(*args, **kwargs)
            outputs = dict(_named_tensors("output", output))
        found = {name: tensor.detach() for name, tensor in outputs.items() if tensor.is_floating_point()}
        wanted = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if wanted and leaves and gradients:
            upstream = [_upstream(tensor, index, self.seed) for index, tensor in enumerate(wanted.values())]
            with uncompiled(), in_backward(modes):
                back = torch.autograd.grad(
                    list(wanted.values()), list(leaves.values()), upstream, allow_unused=True, materialize_grads=False
                )
            found |= {
                f"{GRADIENT}{name}": gradient
                for name, gradient in zip(leaves, back, strict=True)
                if gradient is not None
            }
        return found

    def step(self) -> None:
        """Run forward and backward as in training, dropout included; gradients are dropped."""
        args, kwargs = _fresh((self.args, self.kwargs), copies=False)
        leaves = [tensor for _, tensor in _named_tensors("", (args, kwargs)) if tensor.requires_grad]
        leaves += [tensor for tensor in parameters_of(self.module) if tensor.requires_grad]
        outputs = [tensor for _, tensor in _named_tensors("", self.call(*args, **kwargs)) if tensor.requires_grad]
        if outputs and leaves:
            upstream = [torch.ones_like(tensor) for tensor in outputs]
            torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal where the work is the same: the same code on the same shapes."""
        tensors = [*parameters_of(self.module), *(tensor for _, tensor in _named_tensors("", (self.args, self.kwargs)))]
        return (type(self.module), tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def captured(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[str, Unit]:
    """Return what each of ``modules`` is first given while ``run`` is called."""
    found: dict[str, Unit] = {}

    def hook(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in found:
                kept_args, kept_kwargs = _fresh((args, kwargs))
                found[path] = Unit(path, module, module, kept_args, kept_kwargs)

        return note

    handles = [
        module.register_forward_pre_hook(hook(path), with_kwargs=True, prepend=True) for path, module in modules.items()
    ]
    try:
        with uncompiled():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _upstream(output: Tensor, index: int, seed: int) -> Tensor:
    """Draw a gradient that is the same whatever the output's precision: in float32 on the CPU.

    Of a scalar it is 1, as ``backward()`` of a loss has it.
    """
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(seed + index + 1)
    drawn = torch.randn(tuple(output.shape), generator=generator)
    return drawn.to(output.device, output.dtype)


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, dicts and objects with attributes, by a name for its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _named_tensors(f"{name}.{key}", each)
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _named_tensors(f"{name}.{index}", each)


def _fresh(value: Any, *, copies: bool = True) -> Any:
    """Copy ``value`` with its tensors as leaves of their own; each tensor once, however often it stands there."""
    made: dict[int, Tensor] = {}

    def one(each: Any) -> Any:
        if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
            if id(each) not in made:
                copy = each.detach().clone() if copies else each.detach()
                made[id(each)] = copy.requires_grad_(each.requires_grad)
            return made[id(each)]
        if type(each) is tuple:
            return tuple(one(part) for part in each)
        if type(each) is list:
            return [one(part) for part in each]
        if type(each) is dict:
            return {name: one(part) for name, part in each.items()}
        if copies and _has_state(each):
            return _copied(each)
        return each

    return one(value)


def _has_state(value: Any) -> bool:
    """Return whether it is an object that a call may change, as a cache of keys and values."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, nn.Parameter, type)) and not callable(value)


def _copied(value: Any) -> Any:
    """Return a copy with tensors of its own; the object itself where it cannot be copied."""
    memo: dict[int, Any] = {}
    stack, seen = [value], set()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            memo[id(each)] = each.detach().clone().requires_grad_(each.requires_grad)
        elif isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, (list, tuple, set)):
            stack += each
        elif _has_state(each):
            stack += vars(each).values()
        elif isinstance(each, nn.Module):
            memo[id(each)] = each
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever an object's own __deepcopy__ or __reduce__ raises
        return value


# The user's own code in float64, unedited: the truth that an original and its replacement are both measured against.
#
# ``deepcopy(module).double()`` is no truth: closures keep the old modules, and code names float32. Here every torch
# call is given its floating tensors as float64, and every float type it is told becomes float64.


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
        """Return the copy that stands for ``leaf``, or the leaf itself where it is float64 already."""
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
        """Return what ``func`` draws in the type that it has without this mode, as float64."""
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
    """Turn the modes on inside each backward pass too, where checkpointing runs a part of forward again.

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
