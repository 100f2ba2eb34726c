"""Another thread compiles something, or is in compiled code, when a measurement begins."""

from __future__ import annotations

import _thread
import sys
import threading
from contextlib import nullcontext
from threading import Event, Thread, get_ident
from typing import Any

import pytest
from torch.torch_version import __version__ as torch_version

import gradscope
from gradscope.compat import following_dynamo, watching_dynamo
from gradscope.compat.dynamo import entry
from gradscope.compat.dynamo.entry import _Calls

# Loading Dynamo warns of its own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def test_a_compilation_that_runs_already_is_told() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    told: list[bool] = []
    failed: list[Exception] = []
    running = callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0")
    running.__enter__()
    with watching_dynamo(told.append, failed.append):
        assert told == [True]
        running.__exit__(None, None, None)
        assert told == [True, False]
    assert not failed


def test_where_nothing_is_compiled_nothing_is_told() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    told: list[bool] = []
    with watching_dynamo(told.append, pytest.fail):
        assert not told
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            assert told == [True]
    assert told == [True, False]


# torch 2.11 alone, without gradscope, ends so: 12 lines with a thread that has compiled a broken graph and is gone.
@pytest.mark.skipif(torch_version < (2, 12), reason="what this torch compiles next is a segmentation fault")
def test_a_thread_that_is_in_compiled_code_already_is_told_of_until_it_has_left_it() -> None:
    import torch

    inside, go_on = Event(), Event()

    @torch._dynamo.disable
    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    @torch.compile(backend="eager")
    def inner(x: torch.Tensor) -> torch.Tensor:
        wait()
        return x + 1

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x * 2) * 3

    told: list[tuple[bool, int]] = []
    thread = Thread(target=outer, args=(torch.ones(2),))
    thread.start()
    assert inside.wait(60)
    with following_dynamo(lambda *entered: told.append(entered), nullcontext, nullcontext, pytest.fail):
        assert told == [(True, thread.ident)]
        go_on.set()
        thread.join()
        assert set(told[1:-1]) <= {(True, thread.ident)} and told[-1] == (False, thread.ident)
        told.clear()
        outer(torch.ones(2))
        assert told == [(True, get_ident()), (False, get_ident())]


def test_of_threads_that_threading_did_not_start_none_is_left() -> None:
    import torch

    over = Event()
    run = torch.compile(lambda x: x + 1, backend="eager")
    run(torch.ones(2))  # torch logs what it compiles, and the log asks for the thread

    def other() -> None:
        run(torch.ones(2))
        over.set()

    net = torch.nn.Linear(2, 2)
    before = threading.enumerate()
    with gradscope.profiling(net, steps=2, warmup=1) as prof:
        _thread.start_new_thread(other, ())
        assert over.wait(60)
        while not prof.step():
            net(torch.ones(2)).sum().backward()
    assert [each for each in threading.enumerate() if type(each).__name__ == "_DummyThread"] == [
        each for each in before if type(each).__name__ == "_DummyThread"
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_where_a_signal_raises_when_a_compilation_has_ended_torch_counts_it(error: type[BaseException]) -> None:
    """A handler of the program's, a time limit say, may run at any time."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    def compiling(begins: bool) -> None:
        if not begins:
            raise error

    with watching_dynamo(compiling, pytest.fail):
        with pytest.raises(error), callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            pass
        assert not callback_handler._CompilationCallbackHandler__pending_callbacks_counter  # type: ignore[attr-defined]
    told: list[bool] = []
    with (
        watching_dynamo(told.append, pytest.fail),
        callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"),
    ):
        pass
    assert told == [True, False]


def test_a_frame_that_lies_where_a_compiled_functions_lay_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may end a call without a word, and its frame is then another one's."""
    import torch

    run = torch.compile(lambda x: x + 1, backend="eager")
    run(torch.ones(2))
    made: list[Any] = []
    monkeypatch.setattr(entry, "_Calls", lambda *args: made.append(_Calls(*args)) or made[-1])
    told: list[bool] = []
    with following_dynamo(lambda entered, _: told.append(entered), nullcontext, nullcontext, pytest.fail):
        made[0]._here.frame = id(sys._getframe())
        run(torch.ones(2))
    assert told == [True, False]
