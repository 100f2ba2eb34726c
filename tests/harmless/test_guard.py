"""What comes out of gradscope's own code, and what stays a note."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gradscope.capture.guard import Guard


class Alarm:
    """A handler that is a method."""

    def ring(self, *_: Any) -> None:
        raise TimeoutError("late")


def ring(*_: Any) -> None:
    raise TimeoutError("late")


@pytest.fixture(params=[ring, Alarm().ring], ids=["function", "method"])
def alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def work() -> str:
    signal.raise_signal(signal.SIGUSR1)
    return "done"


@pytest.mark.usefixtures("alarm")
def test_what_a_signals_handler_raises_is_the_users() -> None:
    guard = Guard()
    with pytest.raises(TimeoutError, match="late"), guard.over("a part"):
        work()
    with pytest.raises(TimeoutError, match="late"):
        guard.hook("a part", work)()
    assert not guard.failed


@pytest.mark.hostile_objects
def test_an_error_of_our_own_is_a_note() -> None:
    guard = Guard()
    with guard.over("a part"):
        ring()
    assert guard.failed == {"a part": "TimeoutError: late"}


@pytest.mark.hostile_objects
def test_the_first_error_of_a_part_is_told() -> None:
    """Those that follow are often of its making."""
    guard = Guard()
    for error in (ValueError("first\nmore"), KeyError("second")):
        guard.note("a part", error)
    guard.note("another", OSError())
    assert guard.failed == {"a part": "ValueError: first", "another": "OSError"}


class Around:
    """A context of gradscope's that does as it is told when it is left."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.raises = raises
        self.left_with: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        self.left_with = error
        if self.raises is not None:
            raise self.raises


@pytest.mark.hostile_objects
@pytest.mark.parametrize("ours", [None, ValueError("ours")], ids=["leaves well", "fails"])
@pytest.mark.parametrize("theirs", [ZeroDivisionError("theirs"), KeyboardInterrupt("theirs")])
def test_the_users_error_comes_out_as_it_is(ours: Exception | None, theirs: BaseException) -> None:
    guard, inner = Guard(), Around(ours)
    with pytest.raises(type(theirs)) as caught, guard.around("a part", lambda: inner):
        raise theirs
    assert caught.value is theirs is inner.left_with
    assert guard.failed == ({} if ours is None else {"a part": "ValueError: ours"})


def test_the_users_error_that_a_context_lets_through_is_no_error_of_ours() -> None:
    guard, error = Guard(), ValueError("theirs")
    with pytest.raises(ValueError, match="theirs"), guard.around("a part", lambda: Around(error)):
        raise error
    assert not guard.failed


@pytest.mark.hostile_objects
def test_a_context_that_fails_is_a_note() -> None:
    guard, ran = Guard(), []
    with guard.around("leaving", lambda: Around(ValueError("ours"))):
        ran.append(1)
    with guard.around("entering", lambda: 1 / 0):  # type: ignore[arg-type, return-value]
        ran.append(2)
    assert ran == [1, 2]
    assert guard.failed == {"leaving": "ValueError: ours", "entering": "ZeroDivisionError: division by zero"}


def test_an_interrupt_meanwhile_goes_its_way() -> None:
    guard = Guard()
    with pytest.raises(KeyboardInterrupt), guard.around("a part", lambda: Around(KeyboardInterrupt())):
        pass
    with pytest.raises(KeyboardInterrupt), guard.over("a part"):
        raise KeyboardInterrupt
    assert not guard.failed
