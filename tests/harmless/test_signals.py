"""A signal's handler of the program's raises wherever gradscope is, a time limit say, and the program trains on."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.optim import optimizer as optimizers

import gradscope
from gradscope import tensor_refs
from gradscope.capture import guard as guards
from gradscope.capture import storages
from gradscope.capture.guard import Guard
from gradscope.capture.phases.base import Phase
from gradscope.capture.session import MOST_INTERRUPTED, Session
from gradscope.capture.storages import StorageReader
from gradscope.errors import NothingMeasuredError
from gradscope.interrupts import is_interruption
from gradscope.recording.tape import Tape

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals of the program's own")


class TimeLimit(Exception):
    pass


def _kinds(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


_OF_PHASES = ("enter", "begin_step", "end_step", "keep", "fits")
PLACES = [(Session, name) for name in ("_enter", "_leave", "_begin_step", "_turn", "_next_phase")] + [
    (kind, name) for kind in _kinds(Phase) for name in _OF_PHASES if name in vars(kind)
]
# Where errors of what is looked at are kept without a guard.
PLACES += [(Tape, "call"), (StorageReader, "_found"), (storages, "_given")]


class _Raises:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, *_: Any) -> None:
        raise self.error


@pytest.fixture
def limit(error: type[BaseException]) -> Iterator[type[BaseException]]:
    before = signal.signal(signal.SIGUSR1, _Raises(error))
    yield error
    signal.signal(signal.SIGUSR1, before)


def plant(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, number: int, *, behind: bool) -> list[int]:
    """Have the signal come in front of the n-th call of that function, or behind it; the list tells of calls."""
    original: Callable[..., Any] = getattr(kind, name)
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        comes = len(calls) - 1 == number
        if comes and not behind:
            signal.raise_signal(signal.SIGUSR1)
        found = original(*args, **kwargs)
        if comes and behind:
            signal.raise_signal(signal.SIGUSR1)
        return found

    monkeypatch.setattr(kind, name, call)
    return calls


def left() -> dict[str, Any]:
    """What gradscope changes of torch while it measures."""
    return {
        "engine": torch.autograd.graph._engine_run_backward,  # type: ignore[attr-defined]
        "profiler": torch._C._autograd._profiler_enabled(),
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "function": torch._C._len_torch_function_stack(),
        "optimizer": len(optimizers._global_optimizer_post_hooks),
        "modules": {name: len(table) for name, table in vars(torchs).items() if name.startswith("_global_f")},
        "table": dict(vars(torchs._global_forward_hooks)),
    }


def train(limit: type[BaseException], steps: int) -> tuple[int, Any]:
    """How often the program caught it, and the report."""
    torch.manual_seed(0)
    net, caught = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), 0
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with gradscope.profiling(net, steps=2, warmup=1) as prof:
        for _ in range(steps):
            try:
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if prof.step():
                    break
            except limit:
                caught += 1
    return caught, prof.report


@pytest.mark.parametrize(
    ("number", "behind", "error"),
    [(0, False, KeyboardInterrupt), (0, True, TimeLimit), (1, False, TimeLimit), (3, True, TimeLimit)],
)
@pytest.mark.parametrize(("kind", "name"), PLACES, ids=lambda each: getattr(each, "__name__", each))
def test_the_program_trains_on_and_nothing_of_ours_is_left(
    kind: type,
    name: str,
    number: int,
    behind: bool,
    limit: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = left()
    with monkeypatch.context() as planted:
        calls = plant(planted, kind, name, number, behind=behind)
        try:
            caught, report = train(limit, 60)
        except limit:  # when it began, or ended
            caught, report = 1, None
    assert left() == before
    assert caught == (len(calls) > number)
    if report is not None and caught:
        assert {row.path for row in report.data.layers if row.backward_self_ns} == {"0", "1", "2"}
        assert not report.data.partial
    if caught:
        assert train(limit, 60)[1].data.workload.steps == 2  # another one begins as ever
        assert left() == before


@pytest.mark.parametrize("error", [TimeLimit])
@pytest.mark.parametrize("kind", [each for each in _kinds(Phase) if {"enter", "name"} <= vars(each).keys()])
def test_a_phase_that_the_program_interrupts_whenever_it_begins_is_left_out(
    kind: type[Phase], limit: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the time of a step, say, that it takes longer to begin: the program would train no more."""

    def enter(self: Phase, exits: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        original(self, exits)

    before, original = left(), kind.enter
    with monkeypatch.context() as planted:
        planted.setattr(kind, "enter", enter)
        words = ""
        try:
            caught, report = train(limit, 60)
            words = " ".join(report.data.notes)
        except NothingMeasuredError as error:  # without timed steps there is nothing
            caught, words = MOST_INTERRUPTED, str(error)
        except limit:  # the first begins with the measurement
            caught = 0
    assert left() == before and caught in {0, MOST_INTERRUPTED}  # none where it is not wanted
    assert not caught or "the program interrupts it" in words


_GUARDED = """
def called(number):
    return len(str(number))

def guarded(guard, raises, *what):
    with guard.over("something"):
        raises(*what)
        for number in range(100_000):
            called(number)
"""


def own_code() -> Callable[..., None]:
    """A function that calls what it is given below a guard, as code of gradscope's own."""
    made: dict[str, Any] = {}
    exec(compile(_GUARDED, guards.__file__, "exec"), made)
    return made["guarded"]  # type: ignore[no-any-return]


class _Limits:
    def __call__(self, number: int, frame: Any) -> None:
        raise TimeLimit

    def method(self, number: int, frame: Any) -> None:
        raise TimeLimit


class _LetsGo:
    """As some linters ask for."""

    def __call__(self, number: int, frame: Any) -> None:
        del number, frame
        raise TimeLimit


def _puts_another_in_its_place(*_: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise TimeLimit


def _says_it_otherwise(number: Any, frame: Any) -> None:
    number, frame = signal.Signals(number).name, f"line {frame.f_lineno}"
    raise TimeLimit(number, frame)


def _with_a_reason(reason: str, *_: Any) -> None:
    raise TimeLimit(reason)


@pytest.mark.parametrize(
    "handler",
    [
        _Limits(),
        _LetsGo(),
        _Limits().method,
        _puts_another_in_its_place,
        _says_it_otherwise,
        functools.partial(_with_a_reason, "late"),
        functools.partial(_LetsGo()),
    ],
    ids=["object", "lets go", "method", "once", "in words", "partial", "partial of an object"],
)
def test_a_handler_of_any_kind_is_the_programs(handler: Any) -> None:
    guard, before = Guard(), signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeLimit):
            own_code()(guard, signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not guard.failed


@pytest.mark.parametrize("number", [None, "10", 10])
def test_an_error_of_what_was_given_a_frame_is_no_signals(number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(frame: Any, number: Any) -> None:
        raise KeyError

    monkeypatch.setattr(guards, "listeners", [])
    guard = Guard()
    with guard.over("something"):
        looks(sys._getframe(), number)
    assert guard.failed == {"something": "KeyError"}


def test_what_a_function_raises_that_traces_the_program_is_the_programs() -> None:
    def limit(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and inside:
            raise TimeLimit
        return limit if frame.f_code is guarded.__code__ else None

    inside: list[int] = []
    guard, guarded, before = Guard(), own_code(), sys.gettrace()
    sys.settrace(limit)
    try:
        with pytest.raises(TimeLimit):
            guarded(guard, inside.append, 0)
    finally:
        sys.settrace(before)
    assert inside == [0] and not guard.failed


@pytest.mark.parametrize("wanted", ["call", "return", "c_call", "c_return"])
def test_what_a_function_raises_that_profiles_the_program_is_the_programs(wanted: str) -> None:
    def limit(frame: Any, event: str, _: Any) -> None:
        if inside and event == wanted:
            raise TimeLimit

    inside: list[int] = []
    guard, guarded, before = Guard(), own_code(), sys.getprofile()
    sys.setprofile(limit)
    try:
        with pytest.raises(TimeLimit):
            guarded(guard, inside.append, 0)
    finally:
        inside.clear()
        sys.setprofile(before)
    assert not guard.failed


def test_who_hands_frames_about_interrupts_nothing() -> None:
    """An object of the program's that fails as it is looked at, and has a helper that was given its frame."""

    def helper(*_: Any) -> None:
        raise TimeLimit

    for given in ((1, sys._getframe()), (sys._getframe(), "call")):
        error = _raised(functools.partial(helper, *given))
        assert not is_interruption(error, in_own_code=True)
        assert not is_interruption(_raised(lambda given=given: helper(*given)), in_own_code=True)  # type: ignore[misc]


def test_what_another_thread_raises_in_this_one_is_the_programs() -> None:
    """No frame of its own is on the way: it is told by its class, which nothing here raises."""
    guard, here = Guard(), ctypes.c_ulong(threading.get_ident())
    with pytest.raises(TimeLimit):
        own_code()(guard, ctypes.pythonapi.PyThreadState_SetAsyncExc, here, ctypes.py_object(TimeLimit))
    assert not guard.failed


def test_tensors_can_be_swapped_behind_a_limit_that_came_as_the_first_was_referred_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def comes(*_: Any) -> None:
        raise TimeLimit

    before = tensor_refs._swaps.references
    monkeypatch.setattr(tensor_refs._swaps, "references", 0)
    one, other = torch.ones(2), torch.zeros(2)
    with monkeypatch.context() as planted, pytest.raises(TimeLimit):
        planted.setattr(tensor_refs, "tell", comes)
        planted.setattr(tensor_refs, "is_told_of", lambda _: False)
        tensor_refs.tensor_ref(one)
    assert not tensor_refs._swaps.references
    known = tensor_refs.tensor_ref(one)
    assert tensor_refs._swaps.references == 1
    torch.utils.swap_tensors(one, other)
    assert known() is None and one.sum() == 0
    del known
    monkeypatch.setattr(tensor_refs._swaps, "references", before)


@pytest.mark.parametrize("kind", [KeyError, torch.cuda.OutOfMemoryError])
def test_errors_of_torch_and_python_are_no_interruptions(kind: type[Exception]) -> None:
    error = kind()
    assert not is_interruption(error, in_own_code=True)
    try:
        raise error
    except Exception:
        assert not is_interruption(error, in_own_code=True)


def _raised(raises: Callable[[], object]) -> Exception:
    try:
        raises()
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def _by_mock() -> None:
    mock.Mock(side_effect=TimeLimit)()


def _by_a_future() -> None:
    future: Future[None] = Future()
    future.set_exception(TimeLimit())
    future.result()


def _in_a_notebook() -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("class Own(Exception): pass\ndef fails(): raise Own", "<ipython-input-1>", "exec"), made)
    made["fails"]()


def _with_words() -> None:
    raise TimeLimit("too late")


@pytest.mark.parametrize("raises", [_by_mock, _by_a_future, _in_a_notebook, _with_words])
def test_what_objects_of_the_program_raise_is_no_interruption(raises: Callable[[], None]) -> None:
    """Whatever class it is of, and whoever's code raises it: the program knows nothing of gradscope's looking at them.

    Asked without the frames of the program's own that are around here.
    """
    error = _raised(raises)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    assert not is_interruption(error.with_traceback(trace), in_own_code=True)


def test_an_error_that_is_looked_into_is_asked_nothing() -> None:
    class Meta(type):
        @property
        def __module__(cls) -> str:  # type: ignore[override]
            raise AttributeError

    class Odd(Exception, metaclass=Meta):
        @property
        def __traceback__(self) -> None:  # type: ignore[override]
            raise AttributeError

    def raises() -> None:
        raise Odd

    assert not is_interruption(_raised(raises), in_own_code=True)


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    def wrapper(*args: Any) -> None:
        function(*args)

    return wrapper


@pytest.mark.parametrize("decorated", [_shared, torch.no_grad()])
def test_an_error_is_no_signals_for_a_decorator_that_its_handler_has_too(decorated: Any) -> None:
    before = signal.signal(signal.SIGUSR1, decorated(_Limits().method))
    try:
        assert not is_interruption(_raised(decorated(lambda: 1 / 0)))
        with pytest.raises(TimeLimit):
            own_code()(Guard(), signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _wraps_itself(*_: Any) -> None:
    raise TimeLimit


functools.update_wrapper(_wraps_itself, _wraps_itself)


@pytest.mark.parametrize(
    ("handler", "called"),
    [
        (_Limits().method, lambda: _Limits().method(10, None)),
        (_LetsGo(), lambda: _LetsGo()(10, None)),
        (mock.Mock(), mock.Mock(side_effect=TimeLimit)),
    ],
)
def test_what_another_object_of_a_handlers_class_does_is_no_interruption(
    handler: Any, called: Callable[[], None]
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert not is_interruption(_raised(called))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_is_said_to_wrap_itself_is_looked_at_once() -> None:
    before = signal.signal(signal.SIGUSR1, _wraps_itself)
    try:
        assert not is_interruption(_raised(lambda: 1 // 0))
        with pytest.raises(TimeLimit):
            own_code()(Guard(), signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_limit_in_code_that_was_made_for_a_class_of_ours_is_the_programs() -> None:
    """A dataclass's ``__init__``, say."""
    made = {"__name__": "gradscope.tables.columns"}
    exec(compile("def made(raises, *what):\n raises(*what)\n for _ in range(10): pass", "<string>", "exec"), made)
    here = ctypes.c_ulong(threading.get_ident())
    call = made["made"], ctypes.pythonapi.PyThreadState_SetAsyncExc, here, ctypes.py_object(TimeLimit)
    error = _raised(functools.partial(*call))  # type: ignore[arg-type]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    assert trace is not None and is_interruption(error.with_traceback(trace), in_own_code=True)


_HANDED = """
import sys

def looks(number, frame):
    raise KeyError

def guarded(guard, raises):
    with guard.over("something"):
        raises(3, sys._getframe())
"""


def handed() -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(compile(_HANDED, guards.__file__, "exec"), made)
    return made


def test_code_of_ours_that_is_given_its_callers_frame_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own, that compiles a frame say."""
    monkeypatch.setattr(guards, "listeners", [])
    made, guard = handed(), Guard()
    made["guarded"](guard, made["looks"])
    assert guard.failed == {"something": "KeyError"}


def test_what_is_given_our_frame_and_a_word_that_is_no_event_interrupts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "listeners", [])
    frames: list[FrameType] = []
    handed()["guarded"](Guard(), lambda _, frame: frames.append(frame))

    def helper(frame: FrameType, word: str) -> None:
        raise KeyError

    for word, interrupts in (("name", False), ("call", True)):
        try:
            helper(frames[0], word)
        except KeyError as error:
            assert is_interruption(error) is interrupts


def _once(*_: Any, late: str = "late") -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise TimeLimit(late)


def test_a_handler_that_puts_another_in_its_place_and_has_a_keyword_is_the_programs() -> None:
    guard, before = Guard(), signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, _once)
    try:
        with pytest.raises(TimeLimit):
            handed()["guarded"](guard, lambda *_: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not guard.failed


def test_an_error_with_words_that_no_frame_is_on_the_way_of_is_the_objects() -> None:
    """What C code raises for an object of the program's, a future's result say: another thread gives a class alone."""
    loop = asyncio.new_event_loop()
    try:
        for words in ((), ("late",)):
            future = loop.create_future()
            future.set_exception(TimeLimit(*words))
            made: dict[str, Any] = {}
            exec(compile("def plain(raises):\n    raises()", guards.__file__, "exec"), made)
            try:
                made["plain"](future.result)
            except TimeLimit as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this test's
                assert is_interruption(error, in_own_code=True) is not bool(words)
    finally:
        loop.close()


def test_a_library_that_hands_its_frame_about_interrupts_nothing() -> None:
    """It lies in a folder of the standard library's."""
    made: dict[str, Any] = {}
    file = f"{sysconfig.get_path('stdlib')}/site-packages/library.py"
    exec(compile("import sys\ndef hands(helper):\n    helper(1, sys._getframe())", file, "exec"), made)

    def helper(*_: Any) -> None:
        raise TimeLimit

    with pytest.raises(TimeLimit) as raised:
        made["hands"](helper)
    assert not is_interruption(raised.value)
