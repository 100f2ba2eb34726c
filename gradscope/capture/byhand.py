"""Sees module calls that torch's hooks do not: ``module.forward(x)``, and classes with a ``__call__`` of their own.

Torch calls hooks in ``nn.Module.__call__``. Where a step went through models with modules that were never called that
way, or whose parts were called while they were not, ``forward`` of these classes is told of while steps are recorded,
and ``__call__`` where that is the class's own (``trampoline.py``). Programs that call all of their modules as usual are
not touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from gradscope.compat import DYNAMO
from gradscope.trampoline import can_be_told_of, is_told_of, tell
from gradscope.tree import children_of, modules_of

BY_HAND = "detecting modules that are called directly"  # under which the guard notes an error

_UNIMPLEMENTED = nn.Module.forward
TORCHS_CALL: Any = nn.Module.__call__


def classes_to_watch(
    modules: Collection[nn.Module], leaves: Collection[int], called: Callable[[nn.Module], bool]
) -> set[type[nn.Module]]:
    """The classes of modules with calls that no hook told of, in models of which something was called or trained.

    Args:
        modules: of the whole process.
        leaves: ids of the parameters that backward passes have led to.
        called: whether hooks have told of all calls of that module, as far as is known.
    """
    children = {id(child) for module in modules for child in children_of(module)}
    found: set[type[nn.Module]] = set()
    for top in modules:
        if id(top) in children:
            continue
        inside = list(modules_of(top))
        silent = [module for module in inside if not called(module)]
        held = (tensor for module in silent for tensor in module._parameters.values())
        if len(silent) < len(inside) or any(id(tensor) in leaves for tensor in held):
            found |= {type(module) for module in silent}
    return {kind for kind in found if _methods_of(kind)}


def _methods_of(kind: type[nn.Module]) -> list[FunctionType]:
    """The methods by which modules of this class may be called without a hook."""
    if issubclass(kind, torch.jit.ScriptModule) or kind.__module__.startswith(DYNAMO):
        return []
    own = {"forward": _UNIMPLEMENTED, "__call__": TORCHS_CALL}
    held = ((_attribute(kind, name), torchs) for name, torchs in own.items())
    return [function for function, torchs in held if function is not torchs and can_be_told_of(function)]


def _attribute(kind: type[nn.Module], name: str) -> Any:
    """What the class or the first of its bases that has the name holds under it; static methods are not unpacked."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


@contextmanager
def watching(
    kinds: Collection[type[nn.Module]], enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of the calls of modules of these classes until the block is left.

    Args:
        enter: told of a module and its positional arguments; answers whether :obj:`leave` is to be told of the end.
    """
    with ExitStack() as stack:
        for function in {id(each): each for kind in kinds for each in _methods_of(kind)}.values():
            if not is_told_of(function):
                stack.callback(tell(function, _enter_told(enter), _leave_told(leave)))
        yield


@contextmanager
def watching_compiled(
    modules: Iterable[nn.Module], enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of the calls of modules that ``module.compile()`` compiled, inside of which no hook tells of anything.

    Args:
        enter: as of :func:`watching`.
    """
    undo = list(map(partial(_tell_compiled, enter=enter, leave=leave), modules))
    del modules  # no module is kept alive
    try:
        yield
    finally:
        for each in undo:
            each()


def _tell_compiled(
    module: nn.Module, enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Callable[[], None]:
    function: Any = module._compiled_call_impl
    if not can_be_told_of(function) or is_told_of(function):
        return lambda: None
    reference = weakref.ref(module)
    return tell(function, _enter_compiled(reference, enter), _leave_compiled(reference, leave))


def _enter_compiled(reference: weakref.ref[nn.Module], enter: Callable[[nn.Module, Any], bool]) -> Callable[..., bool]:
    def told(*args: Any) -> bool:
        module = reference()
        return not torch.compiler.is_compiling() and module is not None and enter(module, args)

    return told


def _leave_compiled(reference: weakref.ref[nn.Module], leave: Callable[[nn.Module], None]) -> Callable[..., None]:
    def told(*_: Any) -> None:
        module = reference()
        if module is not None:
            leave(module)

    return told


def _enter_told(enter: Callable[[nn.Module, Any], bool]) -> Callable[..., bool]:
    is_compiling = torch.compiler.is_compiling

    def told(module: nn.Module, *args: Any) -> bool:
        return not is_compiling() and enter(module, args)

    return told


def _leave_told(leave: Callable[[nn.Module], None]) -> Callable[..., None]:
    def told(module: nn.Module, *_: Any) -> None:
        leave(module)

    return told
