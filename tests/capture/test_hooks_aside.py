"""Hooks on all modules, out of torch's tables while compiled code is entered."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event, Thread, Timer, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.utils.hooks import RemovableHandle

from gradscope.capture import hooks_aside
from gradscope.capture.hooks_aside import HooksAside
from gradscope.capture.modules import CallRecorder
from gradscope.capture.phases import survey
from gradscope.capture.registry import ModuleRegistry


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: True)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def users(calls: list[str]) -> Iterator[Any]:
    """One hook of the program's before ours, and one behind."""
    handles: list[Any] = []

    def add(name: str) -> Any:
        handles.append(torchs.register_module_forward_hook(lambda *_: calls.append(name)))
        return handles[-1]

    yield add
    for handle in handles:
        handle.remove()


def noting(calls: list[str], name: str) -> Any:
    """What registers a hook."""
    return partial(torchs.register_module_forward_hook, lambda *_: calls.append(name), always_call=True)


def run() -> None:
    nn.Identity()(torch.ones(1))


def test_hooks_are_gone_while_compiled_code_is_entered_and_back_behind_it(users: Any, calls: list[str]) -> None:
    aside = HooksAside()
    users("before")
    mine = noting(calls, "mine")
    with aside.holding(mine):
        users("behind")
        aside.follow(True, get_ident())
        run()
        assert calls == ["before", "behind"]
        assert not torchs._global_forward_hooks_always_called
        aside.follow(True, get_ident())  # told twice
        aside.follow(False, get_ident())
        calls.clear()
        run()
        assert sorted(calls) == ["before", "behind", "mine"]
        assert len(torchs._global_forward_hooks_always_called) == 1
    calls.clear()
    run()
    assert calls == ["before", "behind"]


def test_a_program_that_adds_and_removes_hooks_meanwhile_has_those(users: Any, calls: list[str]) -> None:
    aside = HooksAside()
    first = users("first")
    mine = noting(calls, "mine")
    with aside.holding(mine):
        aside.follow(True, get_ident())
        first.remove()
        users("new")
        aside.follow(False, get_ident())
        run()
        assert sorted(calls) == ["mine", "new"]


def test_what_ends_inside_is_not_put_back(calls: list[str]) -> None:
    aside = HooksAside()
    mine = noting(calls, "mine")
    with aside.holding(mine):
        aside.follow(True, get_ident())
    aside.follow(False, get_ident())
    run()
    assert calls == [] and not torchs._global_forward_hooks


def test_another_thread_that_is_still_inside_keeps_them_away(calls: list[str]) -> None:
    aside = HooksAside()
    mine = noting(calls, "mine")
    with aside.holding(mine):
        inside, ends = Event(), Event()

        def enters() -> None:
            aside.follow(True, get_ident())
            inside.set()
            ends.wait(10)

        other = Thread(target=enters)
        other.start()
        inside.wait(10)
        aside.follow(True, get_ident())
        aside.follow(False, get_ident())
        run()
        assert calls == []
        ends.set()  # without a word that it has left
        other.join()
        aside.follow(False, get_ident())
        run()
        assert calls == ["mine"]


def test_hooks_of_the_next_phase_are_away_too_while_a_thread_is_inside(calls: list[str]) -> None:
    """And come back when it leaves, though the phase began in between."""
    aside = HooksAside()
    first = noting(calls, "first")
    with aside.holding(first):
        aside.follow(True, get_ident())
    second = noting(calls, "second")
    with aside.holding(second):
        run()
        assert calls == []
        aside.follow(False, get_ident())
        run()
        assert calls == ["second"]


def test_nothing_moves_where_dynamo_does_not_look(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: False)
    aside = HooksAside()
    mine = noting(calls, "mine")
    with aside.holding(mine):
        aside.follow(True, get_ident())
        run()
    assert calls == ["mine"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_forked_while_another_thread_enters_compiled_code_takes_the_hooks_out() -> None:
    aside, locked, free = HooksAside(), Event(), Event()

    def follows() -> None:
        with aside._lock:
            locked.set()
            free.wait(60)

    thread = Thread(target=follows)
    with aside.holding(partial(torchs.register_module_forward_pre_hook, lambda *_: None)):
        thread.start()
        locked.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(20)  # else the child would stay where it hangs
            aside.follow(True, get_ident())
            aside.follow(False, get_ident())
            os._exit(0)
        free.set()
        thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_hooks_of_the_programs_make_dynamo_guard_ours(monkeypatch: pytest.MonkeyPatch, users: Any) -> None:
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: False)
    monkeypatch.setattr(hooks_aside, "all_modules", lambda: [layer])
    layer = nn.Linear(1, 1)

    def is_aside() -> bool:
        aside = HooksAside()
        with aside.holding(partial(torchs.register_module_forward_pre_hook, lambda *_: None)):
            aside.follow(True, get_ident())
            found = not torchs._global_forward_pre_hooks
            aside.follow(False, get_ident())
        return found

    assert not is_aside()
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook):
        handle = register(lambda *_: None)
        assert is_aside()
        handle.remove()
        assert not is_aside()
    users("one on all modules")
    assert is_aside()


def test_hooks_are_gone_while_anything_is_compiled_and_may_be_removed_meanwhile(calls: list[str]) -> None:
    """Dynamo raises where a hook that it has seen is gone before its guards are made."""
    aside = HooksAside()

    def register(name: str) -> Any:
        return partial(torchs.register_module_forward_hook, lambda *_: calls.append(name))

    with aside.holding(register("first")):
        aside.compiling(True)
        run()
        with aside.holding(register("second")):  # another phase begins
            run()
        assert not calls and not torchs._global_forward_hooks
        aside.compiling(False)
        run()
        assert calls == ["first"]
        aside.compiling(True)
    assert not torchs._global_forward_hooks
    aside.compiling(False)
    assert not torchs._global_forward_hooks


def test_what_the_program_puts_in_the_place_of_a_hook_of_its_own_stays(users: Any, calls: list[str]) -> None:
    aside, own = HooksAside(), users("old")
    with aside.holding(noting(calls, "mine")):
        aside.follow(True, get_ident())
        torchs._global_forward_hooks[own.id] = lambda *_: calls.append("new")
        aside.follow(False, get_ident())
        run()
    assert sorted(calls) == ["mine", "new"]


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError


def raising(calls: list[str], always: Callable[[], None]) -> None:
    """A module raises, and has two hooks that are called in any case."""
    handles = [torchs.register_module_forward_hook(lambda *_: always(), always_call=True) for _ in range(2)]
    try:
        with pytest.raises(ValueError):
            Raises()(torch.ones(1))
    finally:
        for each in handles:
            each.remove()


def in_a_thread(function: Callable[[], None]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", [lambda function: function(), in_a_thread], ids=["this thread", "another thread"])
def test_hooks_may_go_while_torch_goes_through_them(where: Any, calls: list[str]) -> None:
    """Python raises in who goes through a table that changes meanwhile."""
    aside = HooksAside()

    def turn() -> None:
        calls.append("always")
        aside.follow(True, get_ident())
        assert len(torchs._global_forward_hooks) == 2
        aside.follow(False, get_ident())

    with aside.holding(noting(calls, "mine")):
        raising(calls, lambda: where(turn))
        aside.step()  # it was out at the end, and may come once torch is done
        run()
    assert calls == ["mine", "always", "always", "mine"]
    assert not vars(torchs._global_forward_hooks)


@pytest.mark.parametrize("where", [lambda function: function(), in_a_thread], ids=["this thread", "another thread"])
def test_hooks_do_not_come_while_torch_goes_through_the_table(where: Any, calls: list[str]) -> None:
    aside = HooksAside()
    held = ExitStack()
    raising(calls, lambda: where(lambda: held.enter_context(aside.holding(noting(calls, "mine")))))
    with held:
        aside.step()
        run()
    assert calls == ["mine"] * 2  # of two
    assert not vars(torchs._global_forward_hooks)


def test_they_come_as_soon_as_it_has_gone_through(calls: list[str]) -> None:
    """Another thread's module has raised when a phase begins."""
    aside, begun, ends = HooksAside(), Event(), Event()

    def always() -> None:
        begun.set()
        ends.wait(10)

    thread = Thread(target=lambda: raising(calls, always))
    thread.start()
    begun.wait(10)
    Timer(0.01, ends.set).start()
    with aside.holding(noting(calls, "mine")):
        thread.join()
        aside.step()
        assert len(torchs._global_forward_hooks) == 1


def test_torchs_table_can_be_copied_and_stored_meanwhile() -> None:
    with HooksAside().holding(partial(torchs.register_module_forward_hook, hook_of_a_module)):
        for found in (
            copy.deepcopy(torchs._global_forward_hooks),
            pickle.loads(pickle.dumps(torchs._global_forward_hooks)),
        ):
            assert list(found.values()) == [hook_of_a_module]


def hook_of_a_module(*_: Any) -> None:
    """Can be stored by its name."""


def test_a_table_that_the_program_has_put_aside_is_put_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torchs._global_forward_hooks
    with HooksAside().holding(noting([], "mine")):
        monkeypatch.setattr(torchs, "_global_forward_hooks", OrderedDict())
    monkeypatch.undo()
    assert torchs._global_forward_hooks is table and not vars(table)
    assert not table


def test_dynamo_finds_torchs_table_as_it_is() -> None:
    """It can make nothing of a method of this one dict."""
    aside = HooksAside()
    with aside.holding(noting([], "mine")):
        assert vars(torchs._global_forward_hooks)
        aside.compiling(True)
        assert not vars(torchs._global_forward_hooks)
        aside.compiling(False)
        assert vars(torchs._global_forward_hooks)
        aside.follow(True, get_ident())
        assert not vars(torchs._global_forward_hooks)
        aside.follow(False, get_ident())
        assert vars(torchs._global_forward_hooks)
    assert not vars(torchs._global_forward_hooks)


def test_a_program_that_trains_while_an_error_is_handled(calls: list[str]) -> None:
    """After a package that could not be imported, say."""
    aside = HooksAside()
    with aside.holding(noting(calls, "mine")):
        try:
            raise ImportError
        except ImportError:
            aside.compiling(True)
            assert not torchs._global_forward_hooks
            aside.compiling(False)
            assert torchs._global_forward_hooks
            aside.follow(True, get_ident())
            assert not torchs._global_forward_hooks
            aside.follow(False, get_ident())
            run()
    assert calls == ["mine"]


def test_a_module_that_gets_its_hook_within_a_phase_is_seen_when_it_was_compiled(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: False)
    layer = nn.Linear(1, 1)
    monkeypatch.setattr(hooks_aside, "all_modules", lambda: [layer])
    aside = HooksAside()
    with aside.holding(noting(calls, "mine")):
        aside.follow(True, get_ident())
        assert torchs._global_forward_hooks
        aside.follow(False, get_ident())
        layer.register_forward_hook(lambda *_: None)
        aside.follow(True, get_ident())
        aside.compiling(True)
        aside.compiling(False)
        assert not torchs._global_forward_hooks
        aside.follow(False, get_ident())
        assert torchs._global_forward_hooks


def test_hooks_are_never_in_the_tables_while_another_thread_compiles(calls: list[str]) -> None:
    aside = HooksAside()
    seen: list[int] = []
    with aside.holding(noting(calls, "mine")):
        aside.compiling(True)
        ends = Event()

        def look() -> None:
            while not ends.is_set():
                seen.append(len(torchs._global_forward_hooks))

        thread = Thread(target=look)
        thread.start()
        for _ in range(2000):
            aside.follow(True, get_ident())
            aside.follow(False, get_ident())
        with aside.holding(noting(calls, "next")):
            aside.follow(True, get_ident())
            aside.follow(False, get_ident())
        ends.set()
        thread.join()
        assert seen and not any(seen)
        aside.compiling(False)


def test_hooks_that_dynamo_was_seen_to_guard_are_aside_from_then_on(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: False)
    monkeypatch.setattr(hooks_aside, "all_modules", list)
    aside = HooksAside()
    with aside.holding(noting(calls, "mine")):
        aside.follow(True, get_ident())
        assert torchs._global_forward_hooks
        aside.are_read()
        aside.compiling(True)
        aside.compiling(False)
        assert not torchs._global_forward_hooks
        aside.follow(False, get_ident())
        assert torchs._global_forward_hooks


def test_modules_are_looked_at_again_where_somebody_has_registered_a_hook(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at all objects takes a second where there are millions: not with each compilation."""
    looked: list[None] = []
    net, tensor = nn.Identity(), torch.ones(1, requires_grad=True)

    def all_modules() -> list[nn.Module]:
        looked.append(None)
        return [net]

    monkeypatch.setattr(hooks_aside, "all_modules", all_modules)
    monkeypatch.setattr(hooks_aside, "dynamo_reads_hooks", lambda: False)
    monkeypatch.setattr(hooks_aside, "hooks_made", lambda: RemovableHandle.next_id)
    aside = HooksAside()

    def compile_something() -> int:
        aside.follow(True, get_ident())
        aside.compiling(True)
        aside.compiling(False)
        there = len(torchs._global_forward_hooks_always_called)
        aside.follow(False, get_ident())
        return there

    with aside.holding(noting(calls, "mine")):
        assert [compile_something() for _ in range(3)] == [1, 1, 1] and len(looked) == 1
        tensor.register_hook(lambda _: None)
        assert [compile_something() for _ in range(3)] == [1, 1, 1] and len(looked) == 2
        with aside.holding(noting(calls, "another")):
            assert [compile_something() for _ in range(3)] == [2, 2, 2] and len(looked) == 2
        handle = net.register_forward_hook(lambda *_: None)
        assert [compile_something() for _ in range(3)] == [0, 0, 0] and len(looked) == 3
        handle.remove()


@pytest.mark.parametrize("place", ["put_in", "take_out"])
def test_a_hook_that_a_signal_came_upon_is_not_left(
    calls: list[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is registered and nobody has the handle yet, or is removed and the handle still held."""
    mine, aside = noting(calls, "mine"), HooksAside()
    with aside.holding(mine):
        if place == "put_in":
            aside.compiling(True)

            def register(*args: Any, **kwargs: Any) -> None:
                mine(*args, **kwargs)
                raise KeyboardInterrupt

            aside._hooks[0]._register = register  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                aside.compiling(False)
            assert not torchs._global_forward_hooks and not torchs._global_forward_hooks_always_called
            aside._hooks[0]._register = mine
        else:
            with monkeypatch.context() as patched:
                patched.setattr(RemovableHandle, "remove", signalled(RemovableHandle.remove))
                with pytest.raises(KeyboardInterrupt):
                    aside.compiling(True)
            aside.compiling(True)
            aside.compiling(False)
        run()
    run()
    assert not torchs._global_forward_hooks and not torchs._global_forward_hooks_always_called
    assert place == "take_out" or not calls


def signalled(function: Any) -> Any:
    def call(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    return call


def test_at_the_end_of_the_run_no_hook_is_left(calls: list[str]) -> None:
    aside = HooksAside()
    mine = noting(calls, "mine")
    holding = aside.holding(mine)
    holding.__enter__()
    mine()  # a second time, which nobody knows of
    aside.end()
    assert not torchs._global_forward_hooks and not torchs._global_forward_hooks_always_called
    holding.__exit__(None, None, None)


@contextmanager
def noted(said: list[str]) -> Iterator[None]:
    said.append("on")
    try:
        yield
    finally:
        said.append("off")


def captures(aside: HooksAside) -> None:
    with aside.away():
        pass


@pytest.mark.parametrize(
    "tell", [lambda aside: aside.compiling(True), lambda aside: aside.follow(True, get_ident()), captures]
)
def test_what_dynamo_would_guard_is_off_for_good_once_anything_is_compiled(tell: Callable[[HooksAside], None]) -> None:
    aside = HooksAside()
    said: list[str] = []
    with aside.until_compiled(noted(said)):
        assert said == ["on"]
        tell(aside)
        assert said == ["on", "off"]
        with aside.until_compiled(noted(said)):
            pass
        aside.compiling(False)
        with aside.until_compiled(noted(said)):
            pass
    assert said == ["on", "off"]


def test_what_dynamo_would_guard_is_off_behind_its_block() -> None:
    aside = HooksAside()
    said: list[str] = []
    with aside.until_compiled(noted(said)):
        pass
    aside.compiling(True)
    assert said == ["on", "off"]
    other = HooksAside()
    with other.until_compiled(noted(said)):
        other.end()
        assert said[2:] == ["on", "off"]
    assert len(said) == 4


@pytest.mark.parametrize(
    ("breaks", "reads", "says"), [(True, True, "no layers"), (True, False, "no source lines"), (False, True, "")]
)
def test_where_hooks_are_out_the_report_says_what_has_no_layers(
    breaks: bool, reads: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "breaks_in_models", lambda _: breaks)
    aside = HooksAside()
    if reads:
        aside.are_read()
    phase: Any = SimpleNamespace(
        run=SimpleNamespace(
            may_trace=lambda: True,
            hooks_aside=aside,
            compile_log=SimpleNamespace(failures=list),
            capture=SimpleNamespace(registry=ModuleRegistry()),
        ),
        _recorder=CallRecorder(),
    )
    said = survey.Survey._untold(phase)
    assert len(said) == breaks and all(says in note for note in said)
    assert any("no layers" in note for note in said) is (breaks and reads)


def test_what_is_away_within_what_is_away_comes_back_behind_both(calls: list[str]) -> None:
    aside = HooksAside()
    with aside.holding(noting(calls, "mine")):
        with aside.away():
            with aside.away():
                run()
            run()
        assert not calls
        run()
        assert calls == ["mine"]
