"""Calls that never return, or in which recording ends, and what a recorder tells of calls. Counts, no clock."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.capture import modules
from gradscope.capture.modules import CallRecorder, SpanRecorder

X = torch.ones(2, 4)


class Ending(nn.Module):
    """Ends the recording in its forward."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.stack, self.inner = stack, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.stack.close()
        return out


def test_a_call_in_which_recording_ends_is_around_none_that_follows() -> None:
    recorder, stack = CallRecorder(), ExitStack()
    stack.enter_context(recorder.recording())
    ending, other = Ending(stack), nn.Linear(4, 4)
    ending(X)
    with recorder.recording():
        other(X)
    assert list(recorder.roots) == [recorder.registry.get(ending), recorder.registry.get(other)]
    assert len(recorder._spans._closed) == 5 * recorder.opened()


def test_a_span_that_was_interrupted_before_it_was_noted_has_a_row_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the handler of a signal that raised."""
    spans = SpanRecorder("test ")
    spans.close(spans.open(4))
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(modules, "sequence_number", _raises)
        spans.open(5)
    spans.close(spans.open(6))
    assert spans.table().label.tolist() == [4, -1, 6]
    assert SpanRecorder("test ").table().label.tolist() == []


def _raises() -> int:
    raise TimeoutError


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lost", [1, 20])
def test_calls_that_never_return_end_with_the_one_around_them(
    depth: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What noting their ends takes is counted once."""
    clock = itertools.count(step=10)
    for each in (modules, modules):
        monkeypatch.setattr(each, "perf_counter_ns", lambda: next(clock))
    recorder = CallRecorder()
    layers = [nn.Linear(4, 4) for _ in range(depth + 1 + lost)]
    for layer in layers:
        recorder._enter(layer, ())
    recorder._leave(layers[depth], (), None)
    assert [number for number, *_ in recorder._stack.calls] == [id(layer) for layer in layers[:depth]]
    table = recorder.table()
    assert table.inside_ns is not None and table.around_ns is not None
    assert 0 < table.inside_ns.sum() + table.around_ns.sum() <= next(clock)


def test_a_span_that_is_open_counts_and_has_drawn_nothing_yet() -> None:
    recorder = SpanRecorder("test")
    torch.ones(2, requires_grad=True).exp()
    span = recorder.open(7)
    table = recorder.table()
    assert len(recorder) == 1 and table.high.tolist() == table.low.tolist() and table.low[0] > 0
    recorder.close(span)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x.repeat(3, 1), use_reentrant=False)


def test_what_a_backward_pass_calls_again_is_no_batch() -> None:
    recorder, told = CallRecorder(), list[tuple[int, ...]]()
    recorder.on_root_call = lambda args: told.append(tuple(args[0].shape))
    with recorder.recording():
        Again()(X).sum().backward()
    assert recorder.opened() == 3 and told == [(2, 4)]


def test_classes_that_are_watched_already_are_not_watched_again() -> None:
    class Byhand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, recorder, codes = Byhand(), CallRecorder(), list[Any]()
    recorder.registry.models = lambda: [model]
    original = Byhand.forward.__code__
    with recorder.recording():
        for _ in range(2):
            recorder.look_for_calls_by_hand([model.weight], [model])
            codes.append(Byhand.forward.__code__)
        assert Byhand in recorder.registry.called_by_hand
    assert codes[0] is codes[1] is not original and Byhand.forward.__code__ is original
