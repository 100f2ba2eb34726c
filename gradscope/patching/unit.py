"""What a proof runs: one module on what it was given in the user's step, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.capture.modes import uncompiled
from gradscope.patching.precision import InDouble, WithoutDropout, in_backward
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
        """What its own code gives, as it is and in float64."""
        return self.outcome(), self.outcome(double=True)

    def outcome(self, *, double: bool = False, gradients: bool = True) -> Outcome:
        """Outputs, and gradients of parameters and inputs for a random upstream gradient; without dropout.

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
        """Forward and backward as in training, dropout included; gradients are dropped."""
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
    """What each of ``modules`` is first given while ``run`` is called."""
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
    """A gradient that is the same whatever the output's precision: drawn in float32 on the CPU.

    Of a scalar it is 1, as ``backward()`` of a loss has it.
    """
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(seed + index + 1)
    drawn = torch.randn(tuple(output.shape), generator=generator)
    return drawn.to(output.device, output.dtype)


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, dicts and objects with attributes of their own, by a name for its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _named_tensors(f"{name}.{key}", each)
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _named_tensors(f"{name}.{index}", each)


def _fresh(value: Any, *, copies: bool = True) -> Any:
    """``value`` with its tensors as leaves of their own; each tensor once, however often it stands there."""
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
    """A copy with tensors of its own; the object itself where it cannot be copied."""
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
