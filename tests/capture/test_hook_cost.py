"""What a module call costs with gradscope's hooks, by a clock that counts how often it is read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradscope.capture import modules
from gradscope.capture.guard import Guard
from gradscope.capture.modules import CallCost, CallRecorder, SpanRecorder, measure_call_cost, shared_cost


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of the clock is 10 ns after the one before."""
    clock = itertools.count(0, 10)
    for module in (modules, modules, modules):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(clock))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_every_read_of_the_clock_is_in_one_place(counted: None) -> None:
    """Two in each hook are apart by what it took outside of the row, two by what it took inside."""
    recorder = CallRecorder()
    with recorder.recording():
        Pair()(1)
    calls = recorder.table()
    assert calls.inside_ns is not None and calls.around_ns is not None and calls.open_ns is not None
    assert calls.inside_ns.tolist() == calls.around_ns.tolist() == [20] * 3
    # A call's row is open over three reads; that of the pair over six more of each of the two in it.
    assert calls.open_ns.tolist() == [30 + 2 * 60, 30, 30]


def test_the_rest_of_the_cost_is_measured_on_an_empty_module(counted: None) -> None:
    """Without hooks a call is 10 ns; with them 70, of which the hooks know 40: 20 more, in the parts' proportion."""
    assert measure_call_cost(Guard()) == shared_cost(10, 20, 10) == CallCost(inside=6, around=14)


def test_a_call_by_hand_does_not_pay_torchs_way_to_the_hooks() -> None:
    recorder, module = CallRecorder(), Pair()
    recorder.cost = CallCost(10**12, 10**12)
    recorder.registry.called_by_hand.add(Pair)
    with recorder.recording():
        module.forward(1)
    calls = recorder.table()
    assert calls.inside_ns is not None and calls.around_ns is not None
    assert (calls.inside_ns >= 10**12).tolist() == (calls.around_ns >= 10**12).tolist() == [False, True, True]


def test_the_empty_module_is_not_shown_to_who_stands_in_the_place_of_torchs_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original: Any = nn.Module.__call__
    seen: list[nn.Module] = []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    assert measure_call_cost(Guard()) == CallCost()
    assert not seen


def test_it_is_added_to_what_the_hooks_charged(counted: None) -> None:
    recorder = CallRecorder()
    recorder.cost = CallCost(1000, 2000)
    with recorder.recording():
        Pair()(1)
    calls = recorder.table()
    assert calls.inside_ns is not None and calls.around_ns is not None
    assert calls.inside_ns.tolist() == [1020] * 3 and calls.around_ns.tolist() == [2020] * 3


def test_a_span_that_was_left_open_has_no_cost(counted: None) -> None:
    recorder = SpanRecorder("gradscope:call:")
    first, second = recorder.open(3), recorder.open(4)  # 0 and 10
    recorder.close(second)  # 20
    recorder.close(first, 15, 50, 60)  # 30 and 40
    calls = recorder.table()
    assert calls.label.tolist() == [3, 4]
    assert calls.inside_ns is not None and calls.around_ns is not None and calls.open_ns is not None
    assert calls.inside_ns.tolist() == [65, 0] and calls.around_ns.tolist() == [70, 0]
    assert calls.open_ns.tolist() == [30, 10]


def test_spans_that_nobody_charged_have_no_cost() -> None:
    recorder = SpanRecorder("gradscope:line:")
    recorder.close(recorder.open(0))
    assert recorder.table().inside_ns is None
    assert SpanRecorder("gradscope:line:").table().label.tolist() == []


@pytest.mark.parametrize(
    ("parts", "expected"),
    [((0, 0, 0), (0, 0)), ((30, 10, 20), (15, 5)), ((10, 10, 50), (0, 0)), ((7, 0, 0), (7, 0))],
)
def test_the_cost_of_a_call_without_hooks_is_not_gradscopes(
    parts: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert shared_cost(*parts) == expected


def test_hooks_of_the_user_never_see_the_empty_module() -> None:
    seen: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: seen.append(module))
    try:
        assert measure_call_cost(Guard()) == CallCost()
    finally:
        handle.remove()
    assert seen == []


def test_calls_of_another_thread_meanwhile_spoil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_timed", lambda module: (module(), nn.Identity()(1)) and 1)
    assert measure_call_cost(Guard()) == CallCost()


def test_it_is_no_layer_of_anybodys() -> None:
    recorder = CallRecorder()
    measure_call_cost(Guard())
    assert len(recorder.table()) == 0 and np.array(recorder.modules).size == 0
