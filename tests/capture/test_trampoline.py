"""A function whose calls are told of is the one that it was, whatever a program does with it."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import pytest

from gradscope.trampoline import can_be_told_of, is_made_here, is_told_of, surround, tell


class Base:
    def act(self, x: Any, *rest: Any, by: Any = 1, **named: Any) -> Any:
        kept = [x for _ in range(2)]  # a cell of its own
        return super().__repr__() is not None, kept, rest, by, named, __class__  # type: ignore[name-defined]


class Inherits(Base):
    """Has no ``act`` of its own."""


class Goes(Base):
    def act(self, x: Any, /, other: Any = 3, *, by: Any) -> Any:
        return super().act(x, other, by=by)


Undo = Callable[[], None]


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """What is told of the two functions: the arguments behind the first, and the end."""
    seen: list[Any] = []

    def enter(*args: Any) -> bool:
        seen.append(args[1:])
        return True

    undo = [tell(each.act, enter, lambda *_: seen.append("end")) for each in (Base, Goes)]  # type: ignore[arg-type]
    yield seen
    for each in undo:
        each()
    assert not is_told_of(Base.act) and not is_told_of(Goes.act)  # type: ignore[arg-type]


def test_a_call_is_told_of_and_returns_what_it_did(told: list[Any]) -> None:
    assert Inherits().act(1, 2, by=3, more=4) == (True, [1, 1], (2,), 3, {"more": 4}, Base)
    assert told == [(1, 2), "end"]
    assert Goes().act(1, by=5) == (True, [1, 1], (3,), 5, {}, Base)
    assert told[2:] == [(1, 3), (1, 3), "end", "end"]


def test_the_end_of_a_call_that_raises_is_told_of(told: list[Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        Goes().act(1, by=2, wrong=3)  # type: ignore[call-arg]
    assert told == []  # it is not called

    def fails() -> None:
        raise KeyError("mine")

    undo = tell(fails, lambda: True, lambda: told.append("left"))
    with pytest.raises(KeyError, match="mine"):
        fails()
    undo()
    assert told == ["left"]


def test_it_is_the_same_function_everywhere(told: list[Any]) -> None:
    assert Inherits.act is Base.act and "act" not in vars(Inherits)
    assert {Base.act: 1}[Inherits.act] == 1 and not hasattr(Base.act, "__wrapped__")
    assert pickle.loads(pickle.dumps(Base.act)) is Base.act is copy.deepcopy(Base.act)
    assert inspect.getsource(Base.act).lstrip().startswith("def act(self, x: Any, *rest")
    assert Base.act.__code__.co_name == "act" and Base.act.__code__.co_freevars == ("__class__",)
    method = weakref.WeakMethod(kept := Inherits().act)
    gc.collect()
    assert method() == kept


def test_what_a_program_sets_of_it_meanwhile_stays() -> None:
    def act(x: int, scale: int = 1, *, by: int = 1) -> int:
        count.calls = getattr(count, "calls", 0) + 1
        return x * scale * by

    count: Any = act
    undo = tell(act, lambda *_: True, lambda *_: None)
    act.__defaults__, act.__kwdefaults__, act.__doc__ = (5,), {"by": 2}, "of the program"
    assert act(3) == 30
    undo()
    assert act(3) == 30 and act.__doc__ == "of the program" and count.calls == 2


def test_a_base_that_a_program_patches_is_patched(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    monkeypatch.setattr(Base, "act", lambda self, x: ("patched", x))
    assert Inherits().act(2) == ("patched", 2) and told == []


def test_other_code_that_a_program_gives_it_stays() -> None:
    """As an editor that loads classes again does."""

    def act(x: int) -> int:
        return x + outer

    def new(x: int) -> int:
        return x - outer

    outer = 10
    undo = tell(act, lambda *_: True, lambda *_: None)
    act.__code__ = new.__code__
    assert act(1) == -9
    undo()
    assert act(1) == -9 and act.__code__ is new.__code__


def test_a_copy_of_its_code_in_another_process_runs_what_it_did(told: list[Any]) -> None:
    """Pickled by value, as Ray and joblib do, with all that its code holds."""
    parts = next(each for each in Base.act.__code__.co_consts if isinstance(each, tuple) and len(each) == 3)
    copied = tuple(each if isinstance(each, FunctionType) else pickle.loads(pickle.dumps(each)) for each in parts)
    consts = tuple(copied if each is parts else each for each in Base.act.__code__.co_consts)
    code = Base.act.__code__.replace(co_consts=consts)
    act = FunctionType(code, globals(), "act", None, Base.act.__closure__)
    assert act(Base(), 1, 2, 3, by=2, more=4)[1:5] == ([1, 1], (2, 3), 2, {"more": 4})
    assert told == [] and all(each.__module__ != "gradscope.trampoline" for each in copied)


def test_what_a_call_lets_go_of_is_gone_while_it_runs() -> None:
    """As far as it is without: where Dynamo evaluates frames, Python itself keeps what a call was given.

    It keeps what comes with stars, too, which alone comes without.
    """

    class Thing:
        pass

    def lets_go(self: Any, x: Any, *rest: Any, by: Any, **named: Any) -> list[bool]:
        seen = [weakref.ref(each) for each in (x, by)]
        del x, by
        return [not rest and not named, *(each() is None for each in seen)]

    def fewer(self: Any, x: Any, *, by: Any) -> list[bool]:
        seen = [weakref.ref(each) for each in (x, by)]
        del x, by
        return [each() is None for each in seen]

    for function in (lets_go, fewer):
        alone = function(None, Thing(), by=Thing())  # in an assert pytest would hold them
        undo = tell(function, lambda *_: True, lambda *_: None)
        told = function(None, Thing(), by=Thing())
        undo()
        assert told == alone


def test_behind_the_end_nothing_is_known_of_the_code() -> None:
    """Its id is given again, to code of the program's maybe."""

    def act() -> None:
        """Do nothing."""

    undo = tell(act, lambda: False, lambda: None)
    made = act.__code__
    assert is_made_here(made)
    undo()
    assert not is_made_here(made)


def test_the_end_of_a_call_that_runs_is_told_of_when_no_other_is() -> None:
    seen: list[str] = []

    def act() -> None:
        undo()
        seen.append("in")

    undo = tell(act, lambda: seen.append("enter") is None, lambda: seen.append("leave"))
    act()
    assert seen == ["enter", "in", "leave"]
    act()
    assert seen[3:] == ["in"]


def test_names_of_the_functions_own() -> None:
    def act(told: int, told_: int, *told__: int) -> Any:
        return told, told_, told__

    def only(*args: int) -> Any:
        return args

    seen: list[Any] = []
    told = 4

    def outer(one: int, two: int, three: int) -> Any:
        return one, two, three if told else None

    for function in (act, only, outer):
        undo = tell(function, lambda *args: seen.append(args) is None, lambda *first: seen.append(first))
        assert function(1, 2, 3) in {(1, 2, (3,)), (1, 2, 3)}
        undo()
    assert seen == [(1, 2, 3), (1,)] * 3


def test_its_frame_can_be_looked_at() -> None:
    """One more than alone, in the function's file, at its first line, with the arguments and the cells."""

    class Looks:
        def act(self) -> Any:
            frame = sys._getframe(1)
            return frame.f_code, frame.f_lineno, dict(frame.f_locals), __class__  # type: ignore[name-defined]

    undo = tell(Looks.act, lambda *_: False, lambda *_: None)  # type: ignore[arg-type]
    one = Looks()
    code, line, names, kind = one.act()
    assert is_made_here(code) and (code.co_filename, code.co_name, line) == (__file__, "act", code.co_firstlineno)
    assert (code.co_qualname, line) == (Looks.act.__qualname__, inspect.getsourcelines(Looks.act)[1])
    assert names["self"] is one and names["__class__"] is kind is Looks
    undo()
    assert not is_made_here(one.act()[0])


def test_it_calls_itself_as_deep_as_half_the_stack() -> None:
    def deep(count: int) -> int:
        return count and deep(count - 1)

    undo = tell(deep, lambda *_: True, lambda *_: None)
    try:
        assert deep((sys.getrecursionlimit() - 200) // 2) == 0
    finally:
        undo()


def test_what_outlives_its_time_tells_nothing(told: list[Any]) -> None:
    seen: list[int] = []

    def act(x: int) -> int:
        return x

    undo = tell(act, lambda x: seen.append(x) is None, lambda x: seen.append(-x))
    code: CodeType = act.__code__
    undo()
    act.__code__ = code  # kept by the program
    assert act(3) == 3 and seen == []


def test_what_no_call_runs_is_not_told_of() -> None:
    async def later() -> None:
        return None

    def one_by_one() -> Iterator[int]:
        yield 1

    async def both() -> Any:
        yield 1

    strange = compile("def act(self): pass", "f", "exec").co_consts[0].replace(co_varnames=("no name",))
    assert not any(map(can_be_told_of, (later, one_by_one, both, len, Base, Base().act, FunctionType(strange, {}))))
    assert can_be_told_of(Base.act)


def test_calls_in_a_context() -> None:
    seen: list[Any] = []

    @contextmanager
    def around() -> Iterator[None]:
        number = len(seen)
        seen.append(("in", number))
        yield
        seen.append(("out", number))

    def act(deeper: bool) -> None:
        seen.append(deeper)
        if deeper:
            act(False)
        else:
            raise KeyError

    undo = surround(act, around)
    with pytest.raises(KeyError):
        act(True)
    undo()
    assert seen == [("in", 0), True, ("in", 2), False, ("out", 2), ("out", 0)] and not is_told_of(act)


def test_each_thread_is_in_contexts_of_its_own() -> None:
    seen: list[Any] = []
    first, second = threading.Event(), threading.Event()

    @contextmanager
    def around() -> Iterator[None]:
        yield
        seen.append(threading.current_thread().name)

    def act(waits: bool) -> None:
        if waits:
            first.set()
            assert second.wait(60)

    undo = surround(act, around)
    thread = threading.Thread(target=act, args=(True,), name="other")
    thread.start()
    assert first.wait(60)
    act(False)
    assert seen == [threading.current_thread().name]
    second.set()
    thread.join()
    undo()
    assert seen[1:] == ["other"]
