"""Modules whose ``forward`` a compiled function calls itself, noted in the graph as those that are called.

Torch notes of each node the modules around it as it traces their calls. Where it goes into a ``forward`` whose module
was not called it notes nothing, and the node is the caller's.

Source: torch/_dynamo/symbolic_convert.py (``InliningInstructionTranslator.inline_call``), variables/nn_module.py
(``record_nn_module_stack``), as of torch 2.11 to 2.14.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.imports import once_imported
from gradscope.compat.inductor import CONFIG
from gradscope.compat.private import replaced
from gradscope.process import RoomForCalls

_TRACING, _MODULES, _LAZY = f"{DYNAMO}.symbolic_convert", f"{DYNAMO}.variables.nn_module", f"{DYNAMO}.variables.lazy"
_READ = {
    _TRACING: ("InliningInstructionTranslator.inline_call",),
    _MODULES: ("record_nn_module_stack", "UnspecializedNNModuleVariable.get_nn_module_stack_source"),
    _LAZY: ("LazyVariableTracker.is_realized", "LazyVariableTracker.peek_value"),
}
_INDUCTOR = "inductor"  # the backend, by its name
_FUNCTORCH = "torch._functorch.config"
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
)
_JOINT = "joint_custom_pass"  # of AOTAutograd
_ORDERING = "reorder_for_compute_comm_overlap_passes"  # torch's own by their names
_COMPILED = "L['self']"  # what torch calls the module that was compiled
_CALLS = nn.Module.__init__.__code__.co_filename  # where modules are called


def probe_by_hand() -> None:
    """Look for what is read here of Dynamo, which is imported for that.

    Raises:
        AttributeError, ImportError: this torch lacks something; what is called by hand in a graph is its caller's.
    """
    for module, names in _READ.items():
        for name in names:
            attrgetter(name)(importlib.import_module(module))


@contextmanager
def noting_calls_by_hand(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Have graphs tell of modules whose ``forward`` is called by hand, until the block is left.

    Args:
        failed: called with an error of the noting, where this torch does not have what is read; Dynamo goes on.
    """
    with ExitStack() as stack:

        def begin() -> None:
            try:
                stack.enter_context(_noting(sys.modules[_TRACING], failed))
            except Exception as error:
                failed(error)

        with once_imported(_TRACING, begin):
            yield


@contextmanager
def _noting(tracing: Any, failed: Callable[[Exception], None]) -> Iterator[None]:
    kind = tracing.InliningInstructionTranslator
    original = kind.inline_call  # bound to the class that it is called on: no other overrides it
    # Of all threads: Dynamo lets one trace at a time. It compares names as deep as modules lie, a few frames each, and
    # once more behind the last call.
    room, depth = RoomForCalls(5), 0

    def inline_call(parent: Any, function: Any, args: Any, kwargs: Any, **more: Any) -> Any:
        nonlocal depth
        told: AbstractContextManager[Any] = nullcontext()
        try:
            told = _around(parent, function, args, kwargs)
        except Exception as error:
            failed(error)
        depth += 1
        try:
            if not depth % room.AHEAD:
                room.make(depth)
            with told:
                return original(parent, function, args, kwargs, **more)
        finally:
            depth -= 1

    try:
        with replaced(kind, "inline_call", staticmethod(inline_call)):
            yield
    finally:
        room.close()


def _around(parent: Any, function: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    """What has torch note the module whose ``forward`` a function is, where it has noted no call of that."""
    called = getattr(function, "fn", None)
    if type(called) is not FunctionType or _is_read_by_the_program(parent):
        return nullcontext()
    first = args[0] if args else kwargs.get(next(iter(called.__code__.co_varnames), ""))
    module, source = _module(first)
    if module is None or source is None or not _is_forward(called, module):
        return nullcontext()
    innermost = next(reversed(parent.nn_module_stack), "").partition("@")[0]
    if innermost == str(id(module)) or (not innermost and _is_compiled(parent, source)):
        return nullcontext()
    record: Callable[..., AbstractContextManager[Any]] = sys.modules[_MODULES].record_nn_module_stack
    return record(str(id(module)), source, parent, module)


def _is_read_by_the_program(parent: Any) -> bool:
    """Check that a graph goes to a program that may look at what is noted in it: an export, a backend or a pass."""
    backend = parent.output.compiler_fn
    backend = getattr(backend, "_torchdynamo_orig_backend", backend)
    given, config = getattr(backend, "config", {}), sys.modules.get(CONFIG)

    def setting(name: str) -> Any:
        return given.get(name) or getattr(config, name, None)

    return (
        parent.export
        or not _is_inductor(backend)
        or any(setting(name) is not None for name in _PASSES)
        or any(map(callable, setting(_ORDERING) or ()))
        or getattr(sys.modules.get(_FUNCTORCH), _JOINT, None) is not None
    )


def _is_inductor(backend: Any) -> bool:
    """Check that it is torch's own, and no function or class of the program's by that name."""
    name = getattr(backend, "__name__", getattr(backend, "compiler_name", ""))
    return name == _INDUCTOR and backend.__module__.partition(".")[0] == torch.__name__


def _is_forward(function: FunctionType, module: nn.Module) -> bool:
    """Check that it is the ``forward`` of the module's class, or of one of its bases."""
    return any(vars(kind).get("forward") is function for kind in type(module).__mro__)


def _is_compiled(parent: Any, source: Any) -> bool:
    """Check that it is the module that was compiled, which is whatever runs the graph: of it torch tells nothing.

    A function of a program's may call its argument ``self``, too, and is run by whoever calls it.
    """
    outermost = parent
    while getattr(outermost, "parent", None) is not None:
        outermost = outermost.parent
    calls_it = outermost.f_code.co_filename == _CALLS or outermost.f_code.co_name == "forward"
    return calls_it and _name(source) == _COMPILED


def _module(argument: Any) -> tuple[nn.Module | None, Any]:
    """The module that an argument is, and where the compiled function has it from; nothing is looked into for this.

    By its type: Dynamo would guard what ``isinstance`` asks for.
    """
    if issubclass(type(argument), sys.modules[_LAZY].LazyVariableTracker):
        if not argument.is_realized():
            value = argument.peek_value()
            return (value if issubclass(type(value), nn.Module) else None), argument.source
        argument = argument.realize()
    if not issubclass(type(argument), sys.modules[_MODULES].UnspecializedNNModuleVariable):
        return None, None
    return argument.value, argument.nn_module_stack_source or argument.source


def _name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)
