"""The models of a training script, met at their first forward with gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.tree import modules_of, parameters_of
from gradscope.workload import Workload

Met = Callable[[str, Workload], bool]


class Roots:
    """Calls ``met(name, workload)`` for each module that is called from outside of every other and has parameters.

    A part of one that was met is none, called by itself as it may be: checkpointing runs it again in backward.
    It is called before that module's first forward with gradients, with what this forward was given; tensors are
    copies, without the history that they have. The first model's name is "", a later one's that of its class, numbered
    where that is taken: the same in every run of a program. Once it answers True nothing is watched any more.

    Attributes:
        called: modules with parameters that were called from outside of every other, with gradients or without.
    """

    def __init__(self, met: Met) -> None:
        self._met = met
        self.called: list[nn.Module] = []
        self._known: list[nn.Module] = []
        self._names: set[str] = set()
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every call of a module.

        Not by a hook: these run when the forward that will be called is chosen already.
        """
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what was compiled here keeps this call, which is not to be traced
                return original(module, *args, **kwargs)
            if not self._inside:
                self._note(module)
            if self._inside or not self._is_new(module):
                return self._within(original, module, args, kwargs)
            nn.Module.__call__ = original  # type: ignore[method-assign]  # what is recorded is the user's calls alone
            if not self._look(module, args, kwargs):
                nn.Module.__call__ = call  # type: ignore[method-assign]
            return self._within(original, module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _within(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        outermost, self._inside = not self._inside, True
        try:
            return original(module, *args, **kwargs)
        finally:
            self._inside = not outermost

    def _note(self, module: nn.Module) -> None:
        if all(module is not known for known in self.called) and any(True for _ in parameters_of(module)):
            self.called.append(module)

    def _is_new(self, module: nn.Module) -> bool:
        if not torch.is_grad_enabled() or any(module is part for known in self._known for part in modules_of(known)):
            return False
        return any(parameter.requires_grad for parameter in parameters_of(module))

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = self._free_name(type(module).__name__) if self._known else ""
        self._known.append(module)
        self._names.add(name)
        return self._met(name, Workload(module, _batch(module, _cut(args), _cut(kwargs))))

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}#{number}", number + 1
        return name


def _batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments as a batch: by position where all are, else by name."""
    if not kwargs:
        return args
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def _cut(value: Any) -> Any:
    """``value`` with copies of its tensors, which have no history."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_cut(part) for part in value)
    if type(value) is dict:
        return {name: _cut(part) for name, part in value.items()}
    return value
