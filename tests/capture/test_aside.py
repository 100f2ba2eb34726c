"""Modes of gradscope's and the user's on torch's stacks, while compiled code comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.capture.aside import Aside
from gradscope.compat import dispatch_modes, function_modes


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ours() -> list[Any]:
    return [Function(), Dispatch(), Function()]


@pytest.fixture
def aside(ours: list[Any]) -> Aside:
    return Aside(lambda mode: any(mode is each for each in ours))


def test_while_a_graph_runs_only_the_users_lie_there(aside: Aside, ours: list[Any]) -> None:
    first, dispatch, second = ours
    user, users_dispatch = Function(), Dispatch()
    for mode in (first, dispatch):
        aside.enter(mode)
    with user, users_dispatch:
        aside.enter(second)
        before = function_modes(), dispatch_modes()
        with aside.inside():
            assert function_modes() == [user] and dispatch_modes() == [users_dispatch]
            assert aside.is_aside()
            with aside.inside():  # another graph, which is compiled first say
                assert function_modes() == [user]
            assert function_modes() == [user]
        assert (function_modes(), dispatch_modes()) == before == ([first, user, second], [dispatch, users_dispatch])
        assert aside.leave(second)
    assert aside.leave(dispatch) and aside.leave(first)
    assert not function_modes() and not dispatch_modes()


def test_what_is_called_while_something_is_compiled_changes_nothing(aside: Aside, ours: list[Any]) -> None:
    """Autotuning calls compiled functions of torch's own."""
    mode = ours[0]
    aside.enter(mode)
    aside.begin()
    aside.follow(True, get_ident())
    aside.follow(False, get_ident())
    assert not function_modes()
    aside.end()
    assert function_modes() == [mode] and aside.leave(mode)


def test_the_default_device_stays_at_the_bottom(aside: Aside, ours: list[Any]) -> None:
    """Where torch takes it off again, and nowhere else."""
    mode = ours[0]
    aside.enter(mode)
    with aside.inside():
        torch.set_default_device("cpu")
    try:
        assert [type(each) for each in function_modes()] == [DeviceContext, Function]
    finally:
        torch.set_default_device(None)
    assert function_modes() == [mode] and aside.leave(mode)


def test_nothing_is_put_on_once_the_run_has_ended(aside: Aside, ours: list[Any]) -> None:
    """Another thread than that which trains may end it."""
    aside.enter(ours[0])
    with aside.inside():
        aside.close()
    assert not function_modes()


def test_a_phase_may_begin_and_end_inside_of_compiled_code(aside: Aside, ours: list[Any]) -> None:
    """A compiled training step steps its optimizer, where steps end."""
    first, dispatch, second = ours
    aside.enter(first)
    aside.follow(True, get_ident())
    assert aside.leave(first)
    aside.enter(dispatch)
    aside.enter(second)
    assert not function_modes() and not dispatch_modes()
    aside.follow(False, get_ident())
    assert function_modes() == [second] and dispatch_modes() == [dispatch]
    assert aside.leave(second) and aside.leave(dispatch) and not aside.leave(first)
    assert not function_modes() and not dispatch_modes()


def test_an_end_without_a_beginning_leaves_all_as_it_is(aside: Aside, ours: list[Any]) -> None:
    """Torch tells of the last of several compilations at once that it has ended, whichever thread that is on."""
    aside.enter(ours[0])
    aside.end()
    assert function_modes() == [ours[0]] and not aside.is_aside() and aside.leave(ours[0])


def test_compiled_code_of_another_thread_is_its_own(aside: Aside, ours: list[Any]) -> None:
    mode = ours[0]
    aside.enter(mode)
    found: list[Any] = []

    def other() -> None:
        aside.follow(True, get_ident())
        found.append(aside.leave(mode))
        aside.follow(False, get_ident())
        found.append(function_modes())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [False, []] and function_modes() == [mode] and aside.leave(mode)


def in_thread(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_thread_that_is_told_to_be_in_compiled_code_puts_on_nothing(aside: Aside, ours: list[Any]) -> None:
    told, over = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        assert told.wait(60)
        aside.enter(ours[0])
        found.append(function_modes())
        aside.follow(False, get_ident())
        found.append(function_modes())
        over.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert thread.ident
    aside.follow(True, thread.ident)
    told.set()
    thread.join()
    assert over.is_set() and found == [[], [ours[0]]]


def test_what_a_thread_had_on_is_gone_with_it(aside: Aside, ours: list[Any]) -> None:
    """Whichever thread has its ident then."""
    in_thread(lambda: aside.enter(ours[0]))
    over = threading.Event()
    others = [threading.Thread(target=over.wait, args=(60,)) for _ in range(4)]
    for each in others:
        each.start()
    assert aside.close()
    over.set()
    for each in others:
        each.join()


def test_what_is_compiled_while_a_graph_runs_leaves_that_running(aside: Aside, ours: list[Any]) -> None:
    """Backward is compiled as its node runs, in a run of forward's graph that a checkpoint makes say."""
    with aside.inside():
        aside.compiling(True)
        aside.compiling(False)
        assert aside.is_aside()
    assert not aside.is_aside()


def test_a_thread_that_has_the_ident_of_one_that_was_inside_is_not(aside: Aside) -> None:
    """The system gives the next thread the ident of one that has ended."""
    idents = []
    ready = threading.Event()

    def look() -> None:
        ready.wait()
        idents.append(aside.is_aside())

    thread = threading.Thread(target=look)
    thread.start()
    assert thread.ident is not None
    aside.follow(True, thread.ident)
    ready.set()
    thread.join()
    assert idents == [True]
    assert thread.ident not in aside._entered


class _Other:
    """Another thread, which does one thing after the other as it is told."""

    def __init__(self, *work: Callable[[], object]) -> None:
        self._work = iter(work)
        self.found: list[object] = []

    def __enter__(self) -> _Other:
        self._asked, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def next(self) -> object:
        self._asked.set()
        assert self._done.wait(10)
        self._done.clear()
        return self.found[-1]

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        for each in self._work:
            self._asked.wait(10)
            self._asked.clear()
            self.found.append(each())
            self._done.set()


def test_what_one_thread_had_on_is_not_put_on_another(aside: Aside, ours: list[Any]) -> None:
    """Whichever thread tells that nothing is compiled any more."""

    def begin() -> list[Any]:
        aside.enter(ours[0])
        aside.compiling(True)
        return function_modes()

    def goes_on() -> list[Any]:
        aside.follow(False, get_ident())
        found = function_modes()
        aside.leave(ours[0])
        return found

    with _Other(begin, goes_on) as other:
        assert other.next() == []
        aside.compiling(False)
        assert function_modes() == []
        assert other.next() == [ours[0]]


def test_it_is_not_closed_while_another_thread_has_a_mode_on(aside: Aside, ours: list[Any]) -> None:
    with _Other(lambda: aside.enter(ours[0]), lambda: aside.leave(ours[0])) as other:
        other.next()
        closed = aside.close()
        other.next()
    assert not closed and aside.close()
