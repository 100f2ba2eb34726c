"""Marks on the user's hooks: while they are on and off again, and what they leave as it was."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

from gradscope.capture import backward as hooks_of_gradscope
from gradscope.capture.backward import TensorHooks
from gradscope.capture.guard import Guard
from gradscope.capture.survey import parameter_marker

TENSOR = torch.Tensor


class Marks:
    """Stands for the profiler's marker, and counts."""

    entered: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.entered.append(self.name)

    def __exit__(self, *exc: object) -> None:
        self.entered.append("end")


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every mark that is made, and its end."""
    monkeypatch.setattr(hooks_of_gradscope, "TraceMarker", Marks)
    monkeypatch.setattr(Marks, "entered", [])
    yield Marks.entered


def nothing(_: Any) -> None:
    """A hook."""


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


ONCE = ["gradscope:hook:0", "end"]


def test_hooks_on_any_tensor_are_marked_while_they_are_watched(marks: list[str]) -> None:
    x, seen = leaf(), []
    with TensorHooks().marking():
        x.register_hook(seen.append)
        x.register_post_accumulate_grad_hook(seen.append)
        y = x * 2
        y.register_hook(hook=seen.append)
        y.sum().backward()
        assert len(seen) == 3 and marks == ONCE * 3
        marks.clear()
        y = x * 2
    y.sum().backward()
    assert len(seen) == 5 and marks == []


def test_hooks_from_before_are_marked_where_they_are_found(marks: list[str]) -> None:
    x = leaf()
    x.register_hook(nothing)
    x.register_post_accumulate_grad_hook(nothing)
    found = TensorHooks()
    found.adopt(x)  # too early: nothing is watched
    with found.marking():
        x.sum().backward()
        assert marks == []
        found.adopt(x)
        found.adopt(x)  # once is enough
        x.sum().backward()
        assert marks == ONCE * 2


def test_everything_is_put_back(marks: list[str]) -> None:
    x = leaf()
    before = x.register_hook(nothing)
    found = TensorHooks()
    original = TENSOR.register_hook
    with found.marking():
        found.adopt(x)
        y = x * 2
        y.register_hook(nothing)
        x.register_post_accumulate_grad_hook(nothing)
        assert TENSOR.register_hook is not original
    for tensor in (x, y):
        assert list(tensor._backward_hooks.values()) == [nothing]  # type: ignore[union-attr]
    assert list(x._post_accumulate_grad_hooks.values()) == [nothing]
    assert TENSOR.register_hook is original
    before.remove()
    assert not x._backward_hooks


def test_a_handle_removes_a_marked_hook(marks: list[str]) -> None:
    x = leaf()
    found = TensorHooks()
    old = x.register_hook(nothing)
    with found.marking():
        found.adopt(x)
        new = x.register_hook(nothing)
        old.remove()
        new.remove()
        x.sum().backward()
    assert marks == [] and not x._backward_hooks


def test_what_a_hook_returns_and_raises_is_torchs(marks: list[str]) -> None:
    x = leaf()
    with TensorHooks().marking():
        x.register_hook(lambda gradient: gradient * 3)
        x.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [3, 3]

        def fail(_: Any) -> None:
            raise ZeroDivisionError("the user's")

        x.register_hook(fail)
        with pytest.raises(ZeroDivisionError, match="the user's"):
            x.sum().backward()
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            torch.ones(2).register_hook(nothing)
    assert marks.count("end") == 3


def test_torchs_own_hooks_and_gradscopes_are_none_of_the_users(marks: list[str]) -> None:
    x = leaf()
    with TensorHooks().marking():
        x.register_post_accumulate_grad_hook(parameter_marker(0))
        x.register_hook(functools.partial(functools.partial(torch.nn.functional.relu)))
        x.sum().backward()
    assert marks == []


def test_any_object_may_be_a_hook(marks: list[str]) -> None:
    x, hook = leaf(), MagicMock(return_value=None)
    with TensorHooks().marking():
        x.register_hook(hook)
        x.register_hook(functools.partial(nothing))
        x.sum().backward()
    assert hook.call_count == 1 and marks == ONCE * 2
    assert next(iter(x._backward_hooks.values())) is hook  # type: ignore[union-attr]


def test_nothing_is_kept_alive(marks: list[str]) -> None:
    found = TensorHooks()
    with found.marking():
        x = leaf()
        x.register_hook(nothing)
        (x * 2).register_hook(nothing)
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None and not found._changed


def test_somebody_elses_wrapper_stays(marks: list[str]) -> None:
    original = TENSOR.register_hook

    def theirs(self: torch.Tensor, hook: Any) -> Any:
        return ours(self, hook)

    try:
        with TensorHooks().marking():
            ours = TENSOR.register_hook
            TENSOR.register_hook = theirs  # type: ignore[method-assign]
        assert TENSOR.register_hook is theirs
        x = leaf()
        x.register_hook(nothing)
        x.sum().backward()
        assert marks == []
    finally:
        TENSOR.register_hook = original  # type: ignore[method-assign]


class OwnHooks(torch.Tensor):
    """Keeps its hooks in its own way."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "register_hook":
            return "a handle of its own"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensors_with_hooks_of_their_own_kind_are_left_alone(marks: list[str]) -> None:
    guard = Guard()
    with TensorHooks(guard).marking():
        handle: Any = leaf().as_subclass(OwnHooks).register_hook(nothing)
    assert handle == "a handle of its own" and guard.failed == {}
