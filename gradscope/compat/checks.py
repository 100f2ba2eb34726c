"""Each private interface, run once on a small graph: whether it answers as on the versions that were tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope import versions
from gradscope.compat.engine import saved_value, swap_engine_entry
from gradscope.compat.private import (
    SavedTensor,
    dispatch_depth,
    dispatch_modes,
    function_modes,
    graph_task_id,
    sequence_number,
    tracing_state,
    transform_running,
    transforms_run,
)
from gradscope.compat.profilers import (
    TraceMarker,
    kineto_events,
    kineto_tree,
    new_profiler,
    require_no_profiler,
    start_memory_profiler,
    start_profiler,
    stop_profiler,
)
from gradscope.errors import UnsupportedTorchError


@dataclass(frozen=True, slots=True)
class Check:
    """The answer of one private interface."""

    name: str
    ok: bool
    detail: str


def require() -> None:
    """Raise :class:`UnsupportedTorchError` naming torch's version unless every interface answers as expected."""
    failed = [item for item in check() if not item.ok]
    if failed:
        first = failed[0]
        raise UnsupportedTorchError(
            f"torch {torch.__version__} does not behave as gradscope needs: {first.name}: "
            f"{first.detail}\ngradscope is tested on {versions.tested()}; run 'gradscope doctor' for "
            "the full list."
        )


@cache
def check() -> tuple[Check, ...]:
    """Run every private interface once on a graph of two nodes; cached for the process.

    Raises:
        UsageError: a profiler runs in this process, which one of ours would end.
    """
    require_no_profiler()
    probes: tuple[tuple[str, Callable[[], str]], ...] = (
        ("sequence numbers", _probe_sequence),
        ("backward marker", _probe_engine_entry),
        ("profiler events", _probe_profiler),
        ("checkpoint marker", _probe_recompute),
        ("saved tensors", _probe_saved),
        ("memory events", _probe_memory),
        ("function modes", _probe_modes),
        ("transforms", _probe_transforms),
    )
    return tuple(_run_probe(name, probe) for name, probe in probes)


def _run_probe(name: str, probe: Callable[[], str]) -> Check:
    try:
        with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
            return Check(name, True, probe())
    except Exception as error:  # any failure of a private interface is the answer that is asked for
        return Check(name, False, f"{type(error).__name__}: {error}")


def _small_graph() -> torch.Tensor:
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        return (leaf * 2.0).exp().sum()


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _probe_sequence() -> str:
    before = sequence_number()
    node: Any = _small_graph().grad_fn
    after = sequence_number()
    _expect(after - before == 3, f"three nodes moved the counter by {after - before}")
    _expect(before <= node._sequence_nr() < after, "a node's number lies outside the range drawn while it was made")
    _expect(graph_task_id() == -1, "a graph task is reported outside backward")
    return "torch.autograd._get_sequence_nr, torch._C._current_graph_task_id"


def _probe_engine_entry() -> str:
    seen: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            seen.append(get_ident())
            return original(*args, **kwargs)

        return entry

    with swap_engine_entry(wrap):
        torch.autograd.backward(_small_graph())
    count = seen.count(get_ident())  # other threads may train meanwhile
    _expect(count == 1, f"one backward entered the engine {count} times")
    return "torch.autograd._engine_run_backward"


def _probe_recompute() -> str:
    from torch.utils import checkpoint

    _expect(hasattr(checkpoint, "_recomputation_hook"), "torch.utils.checkpoint has no _recomputation_hook")
    return "torch.utils.checkpoint._recomputation_hook"


def _probe_saved() -> str:
    node: Any = _small_graph().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    _expect(isinstance(node._raw_saved_result, SavedTensor), "what ExpBackward0 saved is no SavedTensor")
    _expect(isinstance(saved_value(node._raw_saved_result), torch.Tensor), "ExpBackward0 shows no saved result")
    return "SavedTensor.data"


def _probe_modes() -> str:
    outside = function_modes()
    with BaseTorchFunctionMode() as mode:
        _expect(function_modes() == [*outside, mode], "a function mode that was entered is not the current one")
    _expect(function_modes() == outside, "a function mode that was left is still the current one")
    _expect(isinstance(dispatch_modes(), list), "the dispatch modes are no list")
    return "torch.overrides and torch.utils._python_dispatch: the stacks of modes"


def _probe_transforms() -> str:
    def seen(x: torch.Tensor) -> torch.Tensor:
        inside.append(transform_running() is not None)
        return x

    inside: list[bool] = []
    torch.func.vmap(seen)(torch.ones(2))
    _expect(inside == [True] and not transforms_run(), "a transform of torch.func does not show")
    outside = dispatch_depth()
    with TorchDispatchMode():
        _expect(dispatch_depth() == outside + 1, "a dispatch mode that was entered is not counted")
    _expect(tracing_state() is None, "torch.jit seems to trace")
    return "torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state"


def _probe_memory() -> str:
    profiler = new_profiler(memory=True)
    kept = start_memory_profiler(profiler)
    try:
        torch.empty(1000)
    finally:
        stop_profiler(profiler)
        del kept
    found = 0
    stack = kineto_tree(profiler)
    while stack:
        event = stack.pop()
        found += event.name == "[memory]" and event.extra_fields.alloc_size == 4000
        stack += event.children
    _expect(found == 1, f"one tensor of 4,000 bytes was reported {found} times")
    return "Allocation nodes of .experimental_event_tree()"


def _probe_profiler() -> str:
    profiler = new_profiler()
    start_profiler(profiler)
    try:
        with TraceMarker("gradscope:probe"):
            _small_graph().backward()  # type: ignore[no-untyped-call]
    finally:
        stop_profiler(profiler)
    events = kineto_events(profiler)
    by_name = {event.name(): event for event in events}
    _expect("gradscope:probe" in by_name, "the trace lacks our marker")
    node = by_name.get("autograd::engine::evaluate_function: ExpBackward0")
    _expect(node is not None, "the trace lacks evaluate_function: ExpBackward0")
    # Inside a dispatch mode of the caller's there are two, of which one draws no number.
    forward = next((event for event in events if event.name() == "aten::exp" and event.sequence_nr() >= 0), None)
    _expect(forward is not None and node is not None and forward.sequence_nr() == node.sequence_nr(), "numbers differ")
    _expect(node is not None and node.fwd_thread_id() == forward.start_thread_id(), "forward thread differs")  # type: ignore[union-attr]
    tree = {root.name for root in kineto_tree(profiler)}
    _expect("gradscope:probe" in tree, "the event tree lacks our marker")
    return f"kineto_results.events() and .experimental_event_tree(), {len(events)} events"
