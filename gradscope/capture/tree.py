"""The modules and parameters below a module, read from torch's own tables.

A class may give ``parameters()``, ``named_modules()`` or ``buffers()`` another meaning, or another signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

Tensors = TypeVar("Tensors", bound=torch.Tensor)


def named_modules_of(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of ``top``, whose path is "", and of all below it, parents first, each once."""
    seen: set[int] = set()
    stack = [("", top)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(name, child) for name, child in module._modules.items() if child is not None]
        stack += [(f"{path}.{name}" if path else name, child) for name, child in reversed(below)]


def modules_of(top: nn.Module) -> Iterator[nn.Module]:
    """``top`` and all below it, each once."""
    return (module for _, module in named_modules_of(top))


def parameters_of(top: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of ``top`` and of all below it, each once."""
    return _each_once(parameter for module in modules_of(top) for parameter in module._parameters.values())


def buffers_of(top: nn.Module) -> Iterator[torch.Tensor]:
    """The buffers of ``top`` and of all below it, each once."""
    return _each_once(buffer for module in modules_of(top) for buffer in module._buffers.values())


def _each_once(items: Iterator[Tensors | None]) -> Iterator[Tensors]:
    seen: set[int] = set()
    for item in items:
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            yield item
