"""Paths of modules inside a module, and what is known of a module without running it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradscope.capture import byhand
from gradscope.tree import join, named_modules_of


def inner_paths(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``top.named_modules()`` without the name under which torch.compile keeps what it wraps."""
    return named_modules_of(top, _path_below)


def _path_below(module: nn.Module, path: str, name: str) -> str:
    return path if name == _ORIGINAL and wrapped(module) is not module else join(path, name)


_ORIGINAL = "_orig_mod"


def wrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile made this one from; itself where it is no compiled one."""
    if type(module).__module__.startswith("torch._dynamo"):
        original = module._modules.get(_ORIGINAL)
        if original is not None:
            return original
    return module


def shape_of(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Paths and classes of a module and all that lies in it: equal for a module and its copy."""
    return tuple((path, type(inner).__name__) for path, inner in inner_paths(module))


def sizes_of(module: nn.Module) -> list[tuple[str, tuple[int, ...] | None]]:
    """Names and shapes of the parameters of a module and of all that lies in it; None for a lazy one's."""
    return [
        (join(path, name), None if is_lazy(held) else tuple(held.shape))
        for path, inner in inner_paths(module)
        for name, held in inner._parameters.items()
        if held is not None
    ]


def own_parameters(module: nn.Module) -> int:
    """Elements of its own parameters."""
    with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
        return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def source_of(module: nn.Module) -> str | None:
    """``file:line`` of the class's forward, for classes that are not torch's own."""
    code = getattr(byhand.unwrapped(getattr(type(module), "forward", None)), "__code__", None)
    if code is None or type(module).__module__.partition(".")[0] == "torch":
        return None
    return f"{local_path(code.co_filename)}:{code.co_firstlineno}"


def local_path(file: str) -> str:
    """``file`` relative to the working folder where it lies below it; as it is where that folder is gone."""
    try:
        folder = os.path.join(os.getcwd(), "")  # of every call: pathlib takes ten times as long
    except FileNotFoundError:  # a script may remove the folder that it works in
        return file
    return file.removeprefix(folder)
