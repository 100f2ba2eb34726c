"""The modules and parameters below a module, read from torch's own tables.

A class may give ``parameters()``, ``named_modules()`` or ``buffers()`` another meaning, or another signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

Tensors = TypeVar("Tensors", bound=torch.Tensor)


def join(path: str, name: str) -> str:
    """Return the path of ``name`` below ``path``; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _path_below(_module: nn.Module, path: str, name: str) -> str:
    return join(path, name)


def named_modules_of(
    top: nn.Module, path_below: Callable[[nn.Module, str, str], str] = _path_below
) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of ``top``, whose path is "", and of all below it, parents first, each once.

    Args:
        path_below: the path of what a module, whose own path is given, holds under a name.
    """
    seen: set[int] = set()
    stack = [("", top)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(name, child) for name, child in module._modules.items() if child is not None]
        stack += [(path_below(module, path, name), child) for name, child in reversed(below)]


def modules_of(top: nn.Module) -> Iterator[nn.Module]:
    """``top`` and all below it, each once."""
    return (module for _, module in named_modules_of(top))


def children_of(top: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that ``top`` itself holds."""
    return (child for child in top._modules.values() if child is not None)


def named_parameters_of(top: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(path, parameter) of ``top`` and of all below it, each once."""
    return _named((path, module._parameters) for path, module in named_modules_of(top))


def named_buffers_of(top: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, buffer) of ``top`` and of all below it, each once."""
    return _named((path, module._buffers) for path, module in named_modules_of(top))


def parameters_of(top: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of ``top`` and of all below it, each once."""
    return (parameter for _, parameter in named_parameters_of(top))


def buffers_of(top: nn.Module) -> Iterator[torch.Tensor]:
    """Return the buffers of ``top`` and of all below it, each once."""
    return (buffer for _, buffer in named_buffers_of(top))


def _named(tables: Iterable[tuple[str, Mapping[str, Tensors | None]]]) -> Iterator[tuple[str, Tensors]]:
    seen: set[int] = set()
    for path, table in tables:
        for name, tensor in table.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield join(path, name), tensor
