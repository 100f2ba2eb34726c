"""What of a program is compiled: frames so far, modules, functions, and what torch.compile puts around these."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from gradscope.compat.dynamo import DYNAMO

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
COMPILED_FROM = "_orig_mod"  # the name under which what torch.compile made of a module has that module


def compiled_frames() -> int:
    """Frames that Dynamo has looked at so far; 0 where it was never loaded."""
    utils = sys.modules.get(f"{DYNAMO}.utils")
    counted = utils.counters.get("frames", {}) if utils is not None else {}  # by key it would be there afterwards
    return int(counted.get("total", 0))


def is_compiled_module(module: nn.Module) -> bool:
    """Check that ``module.compile()`` was called, or that it is what ``torch.compile`` made of a module."""
    return module._compiled_call_impl is not None or hasattr(module, COMPILED_FROM)


def compiles_own_layers() -> bool:
    """Check that Dynamo compiles a layer of torch's own on which ``compile()`` was called.

    Before torch 2.14 it leaves functions of torch's own alone where these are what is to be compiled, and compiles what
    they call of the program's; of what ``torch.compile`` makes of a module it compiles them.
    """
    return _TORCH >= (2, 14)


def compiled_from(module: nn.Module) -> nn.Module:
    """The module that torch.compile made this one from; itself where it is no compiled one."""
    while type(module).__module__.startswith(DYNAMO):  # also of a compiled one
        original = module._modules.get(COMPILED_FROM)
        if original is None:
            break
        module = original
    return module


def is_compiled(value: Any) -> bool:
    """Check that it is what torch.compile made of a function."""
    # A function, by its type: a global of the user's may compute something, or raise, when it is asked for anything.
    if type(value) is not FunctionType:
        return False
    return "_torchdynamo_orig_callable" in vars(value) and "_torchdynamo_disable" not in vars(value)  # which has it too


def wrapper_codes() -> list[CodeType]:
    """The code of the functions that torch.compile may put around another one; none where Dynamo was never loaded."""
    kind = getattr(sys.modules.get(f"{DYNAMO}.eval_frame"), "_TorchDynamoContext", None)
    found = () if kind is None else kind.__call__.__code__.co_consts
    return [each for each in found if isinstance(each, CodeType)]
