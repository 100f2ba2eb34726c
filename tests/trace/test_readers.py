"""Both of torch's interfaces give the same table."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradscope.capture.guard import Guard
from gradscope.capture.modules import CallRecorder
from gradscope.compat import kineto_events, new_profiler, start_profiler, stop_profiler
from gradscope.tables import RowKind
from gradscope.trace import events


def _record(run: Callable[[], None]) -> Any:
    profiler = new_profiler()
    with CallRecorder(Guard()).recording():
        start_profiler(profiler)
        run()
        stop_profiler(profiler)
    return profiler


def _training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with torch.profiler.record_function("mine"):
            loss = model(torch.ones(4, 8)).sum() + checkpoint(model, torch.ones(4, 8), use_reentrant=False).sum()
        loss.backward()
        optimizer.step()


def _double_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    first.square().sum().backward()


class Twice(torch.autograd.Function):
    """Its node is called TwiceBackward, as is the Function that its backward applies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = TwiceBackward.apply(gradient)
        return result


class TwiceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _one_name_for_two() -> None:
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(Twice.apply(x).pow(2).sum(), x, create_graph=True)
    first.square().sum().backward()


@pytest.mark.parametrize("run", [_training, _double_backward, _one_name_for_two])
def test_tree_and_list_agree(run: Callable[[], None]) -> None:
    profiler = _record(run)
    tree = events._from_tree(profiler)
    listed = events._from_list(kineto_events(profiler), device=False, shapes=False)
    assert tree is not None
    assert [tree.names[name] for name in tree.name] == [listed.names[name] for name in listed.name]
    for column in ("kind", "argument", "start_ns", "end_ns", "thread", "sequence", "forward_thread", "parent", "depth"):
        np.testing.assert_array_equal(getattr(tree, column), getattr(listed, column), err_msg=column)
    assert (tree.kind == RowKind.NODE).any()


def test_an_event_that_never_ended_lasts_to_the_end_of_the_trace() -> None:
    """As the optimizer's row does, inside which a script's last step is found to have ended.

    The list is no help to compare with: torch 2.11 leaves such an event out of it.
    """
    profiler = new_profiler()
    start_profiler(profiler)
    with torch.profiler.record_function("open"):
        torch.ones(2) + 1
        stop_profiler(profiler)
    table = events.read_trace(profiler)
    assert table.names[table.name[0]] == "open"
    assert table.end_ns[0] >= table.end_ns.max()
    assert (table.depth[1:] > 0).all()


def test_forward_on_several_threads_needs_the_list() -> None:
    def both() -> None:
        _training()
        thread = threading.Thread(target=_double_backward)
        thread.start()
        thread.join()

    profiler = _record(both)
    assert events._from_tree(profiler) is None
    table = events.read_trace(profiler)
    assert len(np.unique(table.forward_thread[table.kind == RowKind.NODE])) == 2


def test_a_profiler_that_saw_nothing() -> None:
    assert len(events.read_trace(_record(lambda: None))) == 0


@pytest.mark.parametrize(
    ("world", "group", "tensors", "below"),
    [
        ("2", False, True, True),
        (None, True, True, True),  # begun by a program of its own, without torchrun
        ("1", True, True, True),
        ("2", True, False, False),  # nobody has a DTensor
        ("1", False, True, False),
        (None, False, True, False),
        (None, False, False, False),
    ],
)
def test_ops_of_several_ranks_are_read_below_autograd(
    world: str | None, group: bool, tensors: bool, below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DTensor waits inside of an operation."""
    if world is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group)
    modules = {"torch.distributed.tensor": torch} if tensors else {}
    monkeypatch.setattr(events, "sys", SimpleNamespace(modules=modules))
    assert events._communicates_below_autograd() == below


def _in_an_op() -> None:
    """As DTensor does: an operation waits for other ranks, in rows of its own."""
    with torch.profiler.record_function("aten::mm"), torch.profiler.record_function("aten::inner"):
        with torch.profiler.record_function("_c10d_functional::wait_tensor"):
            torch.ones(2) + 1
        torch.ones(2) * 2


def test_what_waits_for_ranks_inside_of_an_op_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever reader, and nothing else of what is inside."""
    profiler = _record(_in_an_op)
    listed = events._from_list(kineto_events(profiler), device=False, shapes=False)
    monkeypatch.setattr(events, "_communicates_below_autograd", lambda: True)
    tree = events._from_tree(profiler)
    assert tree is not None
    for table in (tree, listed):
        assert [table.names[name] for name in table.name] == ["aten::mm", "_c10d_functional::wait_tensor"]
        assert (table.depth.tolist(), table.parent.tolist()) == ([0, 1], [-1, 0])
        assert table.kind[1] == RowKind.COMMUNICATION
