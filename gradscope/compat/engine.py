"""The autograd engine's entry, what its nodes and checkpoints keep, and the hooks of a leaf."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from gradscope.compat.profilers import TraceMarker
from gradscope.ops import UNKNOWN_WAIT, WAIT_ROW


def saved_value(saved: Any) -> Any:
    """What a ``SavedTensor`` of a node's ``_raw_saved_*`` holds, without unpacking it.

    A tensor; or, where hooks packed it (checkpointing, ``save_on_cpu``), whatever they made of it. Unpacking would run
    a checkpoint's forward again.
    """
    return saved.data


def checkpoint_frame(saved: Any) -> Any:
    """The frame of non-reentrant checkpointing that stands behind a ``SavedTensor``; None for any other."""
    from torch.utils import checkpoint

    kind = getattr(checkpoint, "_CheckpointFrame", None)
    hook = getattr(saved, "unpack_hook", None)
    if kind is None or hook is None:
        return None
    return next((value for value in _closure(hook).values() if isinstance(value, kind)), None)


def held_by_checkpoint(frame: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, containers of tensors and ``SavedTensor``) of what a checkpoint keeps for its recompute."""
    if hasattr(frame, "saved_args"):  # torch 2.13
        yield "input", frame.saved_args
    else:  # torch 2.11: the inputs are saved by a node that does nothing else
        node = getattr(frame.input_saver, "grad_fn", None)
        yield "input", getattr(node, "_raw_saved_tensors", ())
        yield "input", _closure(getattr(node, "get_args", None)).get("args")
    held = _closure(frame.recompute_fn)
    yield "input", held.get("kwargs")
    yield "random state", (held.get("fwd_cpu_state"), held.get("fwd_device_states"))
    # Selective checkpointing: the outputs of operations that its policy keeps, each in a wrapper.
    selected = getattr(held.get("recompute_context"), "storage", None) or {}
    yield "selected", [getattr(item, "val", item) for kept in selected.values() for item in _flat(kept)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    found = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # a variable that was never set
            found[name] = cell.cell_contents
    return found


@contextlib.contextmanager
def swap_engine_entry(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the one function through which every Python ``backward`` and ``grad`` enters the engine.

    ``torch.autograd.backward`` and ``torch.autograd.grad`` look the name up in their module at each call, so that
    user code that imported them long ago goes through the replacement too.
    """
    module: Any = torch.autograd
    original = module._engine_run_backward
    replacement = wrap(original)
    module._engine_run_backward = replacement
    try:
        yield
    finally:
        # Somebody who wrapped ours in the meantime keeps their wrapper; ours passes through when inactive.
        if module._engine_run_backward is replacement:
            module._engine_run_backward = original


def current_node_number() -> int:
    """The sequence number of the autograd node that runs on this thread; -1 outside of all."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def has_global_module_hooks() -> bool:
    """Check that a hook on all modules of the process is registered, by anybody."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_MODULES_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def others_global_hooks(own: Collection[int]) -> bool:
    """Check that a hook on all modules is registered whose handle's id is not among these."""
    tables = (getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)
    return any(key not in own for table in tables for key in tuple(table))


def remove_global_hooks(functions: Collection[Callable[..., Any]]) -> None:
    """Remove hooks on all modules that are these functions, by whatever handle."""
    module = torch.nn.modules.module
    further = [
        getattr(module, name, {})
        for name in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs")
    ]
    for table in (getattr(module, name) for name in _GLOBAL_HOOKS):
        for key, hook in list(OrderedDict.items(table)):
            if any(hook is each for each in functions):
                for each in (table, *further):
                    each.pop(key, None)


def keep_hooks_steady(steady: bool) -> None:
    """Have torch go through a copy of its table of forward hooks on all modules, or through the table itself again.

    Where a module has raised it goes through the table itself, for the hooks that are called in any case, and Python
    raises in any thread that does so while a hook comes or goes. An attribute of this one dict is asked before the
    method of its class is. Dynamo asks for it, too, and can make nothing of it: it must not compile meanwhile.
    """
    table: Any = torch.nn.modules.module._global_forward_hooks
    if steady:
        table.items = items_of_now
        _steady[id(table)] = table
    else:
        for each in _steady.values():
            vars(each).pop("items", None)
        _steady.clear()


_steady: dict[int, Any] = {}  # the table that has it; several where the program has put another one in its place


def items_of_now() -> list[tuple[int, Any]]:
    """What is in that table, at once: a function of a module, so that the table can be copied, and stored."""
    table: Any = torch.nn.modules.module._global_forward_hooks
    return list(OrderedDict.items(table))


def goes_through_hooks() -> bool:
    """Check that torch, in any thread, may be going through its table of forward hooks on all modules itself."""
    call = torch.nn.Module._call_impl.__code__
    frames = list(sys._current_frames().values())
    for frame in frames:
        above: FrameType | None = frame
        while above is not None:
            if above.f_code is call and above.f_lasti > _begin_of_handlers(call):
                return True
            above = above.f_back
    return False


@functools.cache
def _begin_of_handlers(code: CodeType) -> int:
    """Where the code behind its ``except`` clauses begins, which lies behind all else; an offset in bytes."""
    begins = [each.offset for each in dis.get_instructions(code) if each.opname == "PUSH_EXC_INFO"]
    return min(begins, default=len(code.co_code))


def has_hooks(module: torch.nn.Module) -> bool:
    """Check that a module has hooks of its own."""
    held = module.__dict__
    return any(held.get(name) for name in _MODULES_HOOKS)


def hook_dicts(leaf: torch.Tensor) -> list[dict[Any, Any]]:
    """The dictionaries of the hooks on a tensor without a node: on its gradient, and behind its accumulation."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [hooks for name in names if (hooks := getattr(leaf, name, None))]


@contextlib.contextmanager
def marking_recompute(name: str) -> Iterator[None]:
    """Write a row ``name`` around each recompute of non-reentrant checkpointing.

    Checkpointing enters one context of its own around exactly that. Where a torch has it no more, nothing is marked
    and a recompute shows only by the module calls and the ops with gradients inside it.
    """
    from torch.utils import checkpoint

    module: Any = checkpoint
    original = getattr(module, "_recomputation_hook", None)
    if original is None:
        yield
        return

    class Marked(original):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            self._gradscope_marker = TraceMarker(name)
            self._gradscope_marker.__enter__()
            return super().__enter__()

        def __exit__(self, *exc: object) -> Any:
            try:
                return super().__exit__(*exc)
            finally:
                self._gradscope_marker.__exit__(None, None, None)

    module._recomputation_hook = Marked
    try:
        yield
    finally:
        if module._recomputation_hook is Marked:
            module._recomputation_hook = original


# What a collective's ``Work`` is for, by torch's own numbers: torch/csrc/distributed/c10d/Work.hpp, ``OpType``.
_OPERATIONS = (
    *("broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_base"),
    *("all_gather_coalesced", "gather", "scatter", "reduce_scatter", "all_to_all_base", "all_to_all", "send", "recv"),
    *("recv_any_source", "barrier", "reduce_scatter_base", "coalesced", "all_reduce_sparse"),
)


@contextmanager
def marking_waits() -> Iterator[None]:
    """Write a row around each wait for a collective that Python makes, with what is waited for: torch writes none.

    Those in C++ have none: of DDP's reducer, and until its buffers are sent.
    """
    work: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Work", None)
    original = None if work is None else work.__dict__.get("wait")
    if original is None:
        yield
        return

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = self._get_op_type() if hasattr(self, "_get_op_type") else -1
        name = _OPERATIONS[number] if 0 <= number < len(_OPERATIONS) else UNKNOWN_WAIT
        with TraceMarker(f"{WAIT_ROW} for {name}"):
            return original(self, *args, **kwargs)

    work.wait = wait
    try:
        yield
    finally:
        if work.__dict__.get("wait") is wait:
            work.wait = original
