"""Objects are looked for among all that Python's collector knows of, beside threads that make some."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from enum import Enum

import pytest
import torch
from torch import nn

from gradscope.process import _with_objects, objects_of, referred_to


class Own(nn.Linear):
    """A class of the user's."""


class Proxy:
    """It answers for another class, by computing something."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("asked for its class")


class Unhashable(type):
    """A metaclass whose classes compare by code of the user's."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(cls) -> int:
        raise AssertionError("hashed")


def _ids(*objects: object) -> set[int]:
    return {id(each) for each in objects}


def test_objects_of_classes_and_of_those_below_them() -> None:
    """None is missed, none comes twice, and none of another class is there."""
    mine = [Own(2, 2), nn.Linear(2, 2), nn.ReLU()]
    found = objects_of(nn.Linear)
    assert _ids(*mine[:2]) <= _ids(*found)
    assert len(_ids(*found)) == len(found)
    assert all(isinstance(each, nn.Linear) for each in found)
    exact = objects_of(nn.Linear, below=False)
    assert id(mine[1]) in _ids(*exact)
    assert {type(each) for each in exact} == {nn.Linear}
    assert id(mine[2]) in _ids(*objects_of(nn.ReLU, Own))
    assert id(mine[0]) in _ids(*objects_of(nn.ReLU, Own))


def test_objects_are_asked_nothing() -> None:
    """Neither a proxy's class, nor how a metaclass compares: that is code of the user's."""
    beside = [Proxy(), Unhashable("Odd", (), {})()]
    assert not objects_of(Enum, below=False)
    assert len(beside) == 2


def test_what_was_found_lives_no_longer_for_it() -> None:
    """A module that is let go of is gone, and so is all beside it that was listed."""
    module = Own(2, 2)
    held = weakref.ref(module)
    assert id(module) in _ids(*objects_of(nn.Module))
    assert not referred_to({id(module)})  # by this frame alone
    del module
    assert held() is None
    count = len(gc.get_objects())
    for _ in range(5):
        objects_of(nn.Module)
        referred_to({1})
    assert len(gc.get_objects()) < count + 50  # of hundreds of thousands: no list of them lives on


def test_what_is_referred_to() -> None:
    """By an object of Python's; the list that is made of all objects does not count."""
    held, lone = torch.ones(2), [torch.ones(2)]
    holder = {"held": held}
    number = id(lone[0])
    assert referred_to({id(held), number, 1}) == {id(held), number}
    assert holder


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    """Whether or not it collects by itself."""
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        objects_of(nn.Module)
        referred_to({1})
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_thread_that_ends_collections_meanwhile_has_ended_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs once the look is over, before the thread that looked goes on."""
    was = gc.isenabled()
    end = gc.enable

    def other_thread_runs() -> None:
        end()
        gc.disable()

    monkeypatch.setattr(gc, "enable", other_thread_runs)
    try:
        end()
        objects_of(nn.Module)
        assert not gc.isenabled()
    finally:
        monkeypatch.undo()
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("look", [lambda: objects_of(nn.Linear), lambda: referred_to({1})], ids=["objects", "referred"])
def test_beside_a_thread_that_makes_tuples(look: Callable[[], object]) -> None:
    """A tuple that is being made must not be held by anybody else: Python says SystemError to who makes it.

    With a list of all objects in Python's hands it does so nearly each time.
    """
    failed: list[Exception] = []
    ends = threading.Event()

    def makes_tuples() -> None:
        while not ends.is_set():
            try:
                tuple(float(i) for i in range(200))
            except SystemError as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    other = threading.Thread(target=makes_tuples)
    other.start()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            look()
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        other.join()
    assert not failed


@pytest.mark.parametrize("enabled", [True, False])
def test_where_an_audit_hook_of_the_programs_raises_the_collector_is_as_it_was(enabled: bool) -> None:
    class RefusedError(Exception):
        pass

    def refuse() -> None:
        raise RefusedError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RefusedError):
            _with_objects(lambda _: [refuse])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
