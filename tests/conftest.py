"""What every test gets: a check that it left torch, the process and the repository as they were."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Before anything imports it: tests of other folders use it too.
pytest.register_assert_rewrite("tests.memory.measuring")

REPOSITORY = Path(__file__).parent.parent
_BUILT = {"build", "dist"}
_OPTIMIZER: Any = sys.modules[torch.optim.Optimizer.__module__]


def _hooks() -> dict[str, int]:
    modules: Any = torch.nn.modules.module
    found = {name: len(value) for name, value in vars(modules).items() if name.startswith("_global_") and value}
    found |= {name: len(value) for name, value in vars(_OPTIMIZER).items() if name.startswith("_global_") and value}
    return found


class _Repository:
    """Files of the repository, but for what tools and interpreters write beside them.

    Looked through again only where a folder has changed: it is asked twice a test.
    """

    def __init__(self) -> None:
        self._changed_ns: dict[str, int] = {}
        self._files: set[str] = set()

    def files(self) -> set[str]:
        try:
            same = bool(self._changed_ns) and all(
                os.stat(each).st_mtime_ns == at for each, at in self._changed_ns.items()
            )
        except FileNotFoundError:
            same = False
        if not same:
            self._look()
        return self._files

    def _look(self) -> None:
        found, self._changed_ns = set(), {}
        for folder, folders, names in os.walk(REPOSITORY):
            self._changed_ns[folder] = os.stat(folder).st_mtime_ns
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__")) and name not in _BUILT]
            found |= {os.path.relpath(os.path.join(folder, name), REPOSITORY) for name in names}
        self._files = {name for name in found if ".egg-info" not in name}


_REPOSITORY = _Repository()


def _process() -> dict[str, Any]:
    autograd: Any = torch.autograd
    graph: Any = torch.autograd.graph
    return {
        "global hooks": _hooks(),
        "engine entry": (autograd._engine_run_backward, graph._engine_run_backward),
        "Function.apply": torch.autograd.Function.__dict__["apply"],
        "tensor hooks": (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
        "recompute hook": torch.utils.checkpoint._recomputation_hook,
        "function mode": _get_current_function_mode(),
        "dispatch mode": _get_current_dispatch_mode(),
        "grad mode": torch.is_grad_enabled(),
        "argv": list(sys.argv),
        "path": list(sys.path),
        "excepthook": sys.excepthook,
        "__main__": sys.modules["__main__"],
        "working folder": os.getcwd(),
    }


def pytest_collection_finish() -> None:
    """Let collections, and what looks through all objects, pass over the millions that eleven thousand tests are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _passed_over() -> None:
    """The same for what the files before this one have imported: torch's compiler alone is a million objects."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Tensors by their form: their content differs from process to process, and says nothing."""
    return _formed(val) if "tensor(" in repr(val) else None


def _formed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_formed(each)}" for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_formed, value))})"
    return getattr(value, "__name__", None) or str(value)


@pytest.fixture(autouse=True)
def every_choice_made_anew() -> None:
    """A test may change what the recipes' choices go by: the interpreter, the sizes."""
    choice: Any = sys.modules.get("gradscope.kernels.choice")
    if choice is not None:
        choice.forget()


@pytest.fixture(scope="session", autouse=True)
def no_width_from_outside() -> None:
    """pytest-xdist tells its processes a width; without it they have none, as under plain pytest."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell ignores SIGINT for what it runs in the background, and what a test starts would inherit that."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def no_limits_from_outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ``gradscope doctor --calibrate`` measured on this machine decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_kernels_from_outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's store takes kernels of other vectors for its own, and gives wrong numbers (ATEN_CPU_CAPABILITY).

    All processes of one run share one: it holds compiled headers, which take longest.
    """
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other, so a busy machine slows two of them far more than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def steps_of_any_spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a small model on a busy machine differ by any factor; tests marked ``unsteady`` look at what follows."""
    from gradscope import pipeline
    from gradscope.capture.phases import timed
    from gradscope.report import header

    if request.node.get_closest_marker("unsteady") is None:
        monkeypatch.setattr(timed, "interrupted", lambda costs: [])
        monkeypatch.setattr(pipeline, "is_unreliable", lambda step: False)
        monkeypatch.setattr(header, "is_unreliable", lambda step: False)
        monkeypatch.setattr(header, "is_starved", lambda step: False)


@pytest.fixture(autouse=True)
def no_error_kept_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which something of gradscope's own failed: users get a note, which a test may not look at."""
    from gradscope.capture import guard

    kept: list[BaseException] = []
    guard.listeners.append(kept.append)
    yield
    guard.listeners.remove(kept.append)
    if request.node.get_closest_marker("hostile_objects") is not None:
        return
    for error in kept:
        raise AssertionError("an error of gradscope's own became a note") from error


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a hook, a patch, a mode, a thread, or a file in the repository."""
    before, threads = _process(), set(threading.enumerate())
    files = _REPOSITORY.files()
    yield
    after = _process()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"left changed: {changed}"
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"threads left running: {left}"
    made = _REPOSITORY.files() - files
    assert not made, f"files left in the repository: {made}"
