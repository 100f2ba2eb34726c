"""Private names of torch that are called or compared as they are; each absent one says so when it is called."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


def private(name: str) -> Any:
    """What a private name of torch stands for; where this torch has it no more, a function whose call says so.

    gradscope can then be imported on any torch, and :func:`require` has the chance to name what is missing.
    """
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found if found is not None else _absent(name)


def _absent(name: str) -> Callable[..., Any]:
    def absent(*args: object, **kwargs: object) -> Any:
        raise AttributeError(f"torch has no {name.removeprefix('torch.')}")

    return absent


def private_or(name: str, instead: Callable[[], Any]) -> Callable[[], Any]:
    """Find a private name as :func:`private` does; ``instead`` where this torch has it no more, for what must go on."""
    found: Callable[[], Any] = private(name)
    return found if found.__module__ != __name__ else instead


#: Next number that a node made by this thread will get. Thread local.
sequence_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")


#: -1 outside a backward pass of this thread.
graph_task_id: Callable[[], int] = private("torch._C._current_graph_task_id")


#: The innermost transform of torch.func that this thread runs; None outside of one.
transform_running: Callable[[], Any] = private_or("torch._C._functorch.peek_interpreter_stack", lambda: None)


#: What torch.jit.trace writes to; None where nothing is traced.
tracing_state: Callable[[], Any] = private_or("torch._C._get_tracing_state", lambda: None)


#: How many modes of ``__torch_dispatch__`` this thread is in, torch's own (fake tensors, make_fx) included.
dispatch_depth: Callable[[], int] = private_or("torch._C._len_torch_dispatch_stack", lambda: 0)


#: The class of what a node's ``_raw_saved_*`` gives.
SavedTensor: Any = private("torch._C._autograd.SavedTensor")


#: The modes of ``torch.overrides`` that this thread is in, the innermost last; and those of ``__torch_dispatch__``.
function_modes: Callable[[], list[Any]] = private("torch.overrides._get_current_function_mode_stack")


dispatch_modes: Callable[[], list[Any]] = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")


def default_device_mode() -> Any:
    """The mode of ``torch.set_default_device`` in this thread; None for none."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def exports() -> bool:
    """Check that torch.export traces, in a way that Dynamo can follow.

    ``torch.compiler.is_exporting`` is what this reads, but Dynamo of torch 2.11 takes that for True in whatever it
    compiles.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def transforms_run() -> bool:
    """Check that a transform of torch.func runs, which makes a graph in each of its passes and lets go of it."""
    return transform_running() is not None


def traces_for_compile() -> bool:
    """Check that this thread traces what it compiles: AOTAutograd goes backward then, through tensors without data.

    These are of modes that it has put on; a context of the program's own alone means nothing.
    """
    return torch._guards.TracingContext.try_get() is not None and dispatch_depth() > 0


def reducer_log(model: Any) -> Mapping[str, Any]:
    """What the reducer of a DistributedDataParallel logs of itself; nothing where this torch has no log."""
    found: Mapping[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    return found


@contextmanager
def replaced(kind: Any, name: str, function: Any) -> Iterator[None]:
    """Put ``function`` in the place of a class's or module's own until the block is left, or others have done so."""
    original = vars(kind).get(name, getattr(kind, name))  # a method of C++ is a descriptor of another kind
    setattr(kind, name, function)
    try:
        yield
    finally:
        if vars(kind).get(name) is function:
            setattr(kind, name, original)


@contextmanager
def surrounded(owner: Any, name: str, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have each call of a function of a class's or module's in a context until the block is left."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with make():
            return original(*args, **kwargs)

    with replaced(owner, name, call):
        yield


_FROM = ("from_trace", "from_trace_with_dict")
_TRACED = ("graph_by_tracing", *(f"function_{name}" for name in _FROM))


@contextmanager
def around_tracing(make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have a context around all that ``torch.jit`` and torch.fx trace until the block is left.

    Its check fails where a mode of ``__torch_dispatch__`` is on, whichever, or where another one is than was before.
    torch.fx rewrites the code of ``forward``. A program may have names of its own for functions of torch: it is around
    what these call.

    Source: torch/jit/_trace.py, as of torch 2.11 to 2.14.
    """
    made = torch._C.ScriptModule
    called = [(torch._C, f"_create_{name}") for name in _TRACED] + [(made, f"_create_method_{name}") for name in _FROM]
    tracing: Any = sys.modules.get("torch.jit._trace")
    with ExitStack() as stack:
        for owner, name in called:
            if hasattr(owner, name):  # else it is of another torch
                stack.enter_context(surrounded(owner, name, make))
        if hasattr(tracing, "_check_trace"):
            stack.enter_context(surrounded(tracing, "_check_trace", make))
        stack.enter_context(surrounded(torch.fx.Tracer, "trace", make))
        yield
