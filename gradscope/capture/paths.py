"""Paths of modules inside a module, and what is known of a module without running it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch import nn

from gradscope.capture import byhand


def inner_paths(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``top.named_modules()`` without the name under which torch.compile keeps what it wraps."""
    seen: set[int] = set()
    stack = [("", top)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        compiled = wrapped(module) is not module
        below = [
            (path if compiled and name == _ORIGINAL else join(path, name), inner)
            for name, inner in module._modules.items()
            if inner is not None
        ]
        stack.extend(reversed(below))


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


def own_parameters(module: nn.Module) -> int:
    """Elements of its own parameters."""
    return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def join(prefix: str, name: str) -> str:
    """The path of ``name`` below ``prefix``; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def source_of(module: nn.Module) -> str | None:
    """``file:line`` of the class's forward, for classes that are not torch's own."""
    code = getattr(byhand.unwrapped(getattr(type(module), "forward", None)), "__code__", None)
    if code is None or type(module).__module__.partition(".")[0] == "torch":
        return None
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def shown_path(file: str) -> str:
    """``file`` relative to the working folder where it lies below it."""
    folder = os.path.join(os.getcwd(), "")  # of every call: pathlib takes ten times as long
    return file.removeprefix(folder)
