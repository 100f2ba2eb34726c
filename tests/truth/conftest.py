"""The truth suite: a meter, a quiet process, and tests that are repeated where a clock disagreed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from .burning import Meter
from .proof import knowing_what_is_left_out

# A test that fails is repeated after a rest. Gradscope's faults stay: they put the same time into the same wrong row
# each time. What a busy machine adds does not, and not all of it can be told from the clocks: a virtual machine that
# has to wait for its processor counts the wait as its own work. The end of the run lists what had to be repeated.
RESTS_S = (0.5, 2, 5, 10)

REPEATED = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test as pytest does, again where it fails."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    repeats = "meter" in arguments and "note_repeat" not in arguments  # some look at no clock, some do so themselves
    for rest in RESTS_S if repeats else ():
        try:
            pyfuncitem.obj(**arguments)
            return True
        except AssertionError:
            _note(pyfuncitem)
            arguments["meter"].clear()
            time.sleep(rest)
    pyfuncitem.obj(**arguments)
    return True


def _note(test: pytest.Item) -> None:
    repeated = test.config.stash.setdefault(REPEATED, {})
    repeated[test.nodeid] = repeated.get(test.nodeid, 0) + 1


@pytest.fixture
def note_repeat(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Note that something was repeated; for tests that repeat only what disagreed."""
    return lambda: _note(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for test, times in config.stash.get(REPEATED, {}).items():
        terminalreporter.write_line(f"repeated {times}x: {test}")


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture(autouse=True)
def left_out() -> Iterator[None]:
    """Tell the proof which steps a run leaves out: the meter has burned in them too."""
    with knowing_what_is_left_out():
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No garbage collection inside a measured step, and ops on one thread: both would cost the layer that runs then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    torch.set_num_threads(threads)
