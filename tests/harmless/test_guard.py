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
