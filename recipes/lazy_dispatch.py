"""What a call of torch's does with a lazy tensor: it looks at the form, or has the tensor computed first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscope.recipes.lazy_graph import Rebased
from gradscope.recipes.lazy_tensor import LazyTensor, family, looked_at, mapped, plain

# What tells of the form and the graph, and needs no content.
_LOOKS = {
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "dtype", "device",
    "layout", "is_contiguous", "is_leaf", "requires_grad", "grad_fn", "grad", "is_floating_point", "is_complex",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "is_inference", "is_same_size",
    "element_size", "itemsize", "nbytes", "get_device", "__len__", "names", "_version", "output_nr",
}  # fmt: skip
_HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
_NAMES = {"__getitem__": "getitem", "__add__": "add", "__radd__": "add", "special_log_softmax": "log_softmax"}


_hidden: set[type[LazyTensor]] = set()


def hidden_from_the_compiler(kind: type[LazyTensor]) -> None:
    """Keep torch.compile from looking into ``kind.handle``: what it would trace is decided anew in each call.

    To tell it so imports it, a second for nothing in a process that compiles nothing.
    """
    if "torch._dynamo" in sys.modules and kind not in _hidden:
        _hidden.add(kind)
        kind.handle = staticmethod(torch.compiler.disable(kind.handle))


def looked(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The answer of a call that asks for the form or the graph and needs no content, alone in a tuple; else nothing."""
    if name in _LOOKS and func is not torch.autograd.grad:
        with torch._C.DisableTorchFunctionSubclass():
            return (func(*mapped(args, looked_at), **mapped(kwargs, looked_at)),)
    if name == "__hash__":
        return (id(args[0]),)
    if name == "_backward_hooks":  # autograd's own, of the tensor that it is given
        with torch._C.DisableTorchFunctionSubclass():
            return (func(*args),)
    return ()


def name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    attribute: str = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__get__" or (name == "__set__" and attribute == "_backward_hooks"):
        return attribute
    return _NAMES.get(name, name)


def computed(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other call, on the tensors themselves."""
    asked = args if name in _HOOKS else kwargs.get("inputs") if name == "backward" else None
    if function is torch.autograd.grad and len(args) > 1:
        asked = args[1]
    by_torch = name == "register_hook" and str(getattr(args[-1], "__module__", "")).startswith("torch.")
    for each in _lazy_in(asked):
        why = "" if by_torch else each._lazy.source.partial(name)  # FSDP's hooks wait for any gradient
        if why:
            raise RuntimeError(why)
    in_place = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    changes = in_place or name in _HOOKS or "out" in kwargs or kwargs.get("inplace")
    sources = {id(each._lazy.source): each._lazy.source for each in _lazy_in((args, kwargs))}.values()
    members = [each for source in sources for each in family(source)] if changes else []
    for each in members:
        plain(each)
    result = function(*mapped(args, plain), **mapped(kwargs, plain))
    with torch.enable_grad():
        for each in members:
            if plain(each).requires_grad:
                Rebased.apply(each, plain(each))  # type: ignore[no-untyped-call]
    return result


def _lazy_in(arguments: Any) -> list[LazyTensor]:
    found: list[LazyTensor] = []

    def note(each: LazyTensor) -> Tensor:
        found.append(each)
        return each

    mapped(arguments, note)
    return found
