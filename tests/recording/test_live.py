"""What a recording holds of the user's lies in one table: once that is dropped, nothing of it is reachable."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.patching.plan import plan
from gradscope.recording import record as recording_module
from gradscope.recording.graph import Recording
from gradscope.recording.record import Recorder, record
from gradscope.recording.tape import Reads, Tape


class Mark:
    """A hook of the user's, which is given to a torch function and which a tensor hangs on."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient


class Net(nn.Module):
    """It stores a tensor, makes a module for one call, and hands on a hook of its own."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.lin, self.error, self.mark = nn.Linear(8, 8), error, Mark()

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.lin(x)
        self.kept.register_hook(self.mark)
        made = self.kept + 1
        h = nn.Dropout(0.0)(0.5 * made * (1 + torch.erf(made / 2**0.5)))
        if self.error is not None:
            raise self.error
        return h


_NOT_THE_USERS = (type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device)


def reachable(*roots: Any) -> list[Any]:
    """All tensors, modules, frames, functions and marks that strong references lead to from ``roots``."""
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _NOT_THE_USERS):
            continue
        seen[id(each)] = each
        if not isinstance(each, (Tensor, nn.Module, FrameType, FunctionType, MethodType, Mark)):
            todo += gc.get_referents(each)
    live = (Tensor, nn.Module, FrameType, FunctionType, MethodType, Mark)
    return [each for each in seen.values() if isinstance(each, live)]


def of_the_user(found: list[Any]) -> list[Any]:
    """Those of them that are not torch's own functions."""
    functions = (FunctionType, MethodType)
    return [each for each in found if not isinstance(each, functions) or not each.__module__.startswith("torch")]


def recorded(model: Net) -> Recording:
    return record(lambda: model(torch.randn(4, 8)).sum())[0]


def profiled(model: Net) -> Recording:
    recorder = Recorder()

    def step() -> None:
        with Through(recorder):
            recorder.below(lambda: model(torch.randn(4, 8)).sum())

    with recorder.watching(Guard(), HooksAside()):
        step()
    assert recorder.recording is not None
    return recorder.recording


class Through(Reads):
    """Hands every call to the recorder, as the mode for lines does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert isinstance(self._recorder, Recorder)
        return self._recorder.call(func, sys._getframe(1), args, kwargs or {})


@pytest.mark.parametrize("made", [recorded, profiled])
def test_nothing_of_the_users_is_reachable_after_the_drop(made: Callable[[Net], Recording]) -> None:
    model = Net()
    recording = made(model)
    names = {type(each).__name__ for each in of_the_user(reachable(recording))}
    assert "Dropout" in names and ("Mark" in names or made is profiled)  # else nothing is tested
    recording.drop()
    assert of_the_user(reachable(recording)) == []
    assert [node.args for node in recording.nodes if node.args] == []
    assert all(node.caller is None or node.caller is model.lin for node in recording.nodes)


def test_what_was_seen_dies_with_the_drop_without_the_collector() -> None:
    model = Net()
    recording = recorded(model)
    callers = [weakref.ref(node.caller) for node in recording.nodes if isinstance(node.caller, nn.Dropout)]
    nodes = list(map(weakref.ref, recording.nodes))
    gc.disable()
    try:
        assert callers and all(each() is not None for each in callers)
        recording.drop()
        assert all(each() is None for each in callers)
        del recording
        assert all(each() is None for each in nodes)
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_with_the_recorder_of_a_run_that_ends_early(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback, which the user may keep, holds the tape."""
    tapes: list[Tape] = []

    class Noted(Tape):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            tapes.append(self)

    monkeypatch.setattr(recording_module, "Tape", Noted)
    for made in (recorded, profiled):
        with pytest.raises(error):
            made(Net(error))
    assert all(tape.nodes for tape in tapes)
    alone, watching = tapes
    assert of_the_user(reachable(alone.nodes, alone.values, alone.live)) == []
    watching.live.drop()
    assert of_the_user(reachable(watching.nodes, watching.values)) == []


def test_nothing_of_the_users_is_reachable_from_a_dropped_plan() -> None:
    model = Net()
    found = plan(model, torch.randn(4, 8), device="cpu")
    assert {site.recipe for site in found.sites} == {"gelu"}
    assert any(each is model for each in reachable(found))
    found.drop()
    assert of_the_user(reachable(found)) == []
    assert all(site.module is None and site.chain == () for site in found.sites)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
