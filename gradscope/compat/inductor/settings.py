"""Inductor's settings while it compiles what is measured: the program's own at any other time."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from operator import attrgetter
from types import FrameType
from typing import Any

from gradscope.compat.inductor import COMPILE_FX, CONFIG, FUNCTORCH_CONFIG
from gradscope.compat.private import replaced

_STANDALONE, _VIRTUALIZED = "torch._inductor.standalone_compile", "torch._inductor.virtualized"
INSIDE = ("_compile_fx_main", "_compile_fx_inner")  # forward and backward, or backward that is compiled later

# While a graph is compiled. One that a cache holds has no nodes any more; what its code was compiled to stays cached.
SETTINGS: tuple[tuple[str, str, Any], ...] = (
    (CONFIG, "trace.provenance_tracking_level", 1),
    (CONFIG, "fx_graph_cache", False),
    (FUNCTORCH_CONFIG, "enable_autograd_cache", False),
)
# Kernels that C++ calls write rows; for others see rows.py.
KERNEL_PROFILE = (CONFIG, "cpp.enable_kernel_profile", True)


class Settings:
    """Inductor's settings, as they are to be while it compiles: at any other time they are the program's to change.

    Torch keeps them thread by thread, but for 2.11: there those who compile at the same time share them.
    """

    def __init__(self) -> None:
        self._values = [_placed(each) for each in SETTINGS]
        self._rows_from_cpp = [*self._values, _placed(KERNEL_PROFILE)]
        self._inductor: Any = sys.modules[CONFIG]
        entry = next(iter(self._inductor._config.values()))
        self._shared = not isinstance(entry.user_override, ContextVar)
        self._lock = threading.RLock()
        self._count = 0  # of those that share them
        self._before = ExitStack()  # what puts them back

    def hold(self) -> bool:
        """Check that the one is set by which graphs are noted: the environment may have caches used in any case."""
        config, name, value = self._values[0]
        return bool(getattr(config, name) == value)

    def kernels_write_rows(self) -> bool:
        """Check that kernels on the CPU write rows by themselves, as the program may have them do."""
        config, name, value = self._rows_from_cpp[-1]
        return bool(getattr(config, name) == value)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have all that is compiled meanwhile compiled with them."""
        compiler = sys.modules[COMPILE_FX]
        with ExitStack() as stack:
            for name in INSIDE:
                stack.enter_context(replaced(compiler, name, self._around(getattr(compiler, name))))
            yield

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with the settings, unless the program asks for a graph that can be written to a file."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_for_a_file():
                return function(*args, **kwargs)
            from_cpp = bool(kwargs.get("cpp_wrapper")) or getattr(self._inductor, "cpp_wrapper", False)
            values = self._rows_from_cpp if from_cpp else self._values
            with self._shared_by_all(values) if self._shared else self._set(values):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def _set(self, values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            for config, name, value in values:
                stack.callback(_put_back, config, name, getattr(config, name), value)
                setattr(config, name, value)
            yield

    @contextmanager
    def _shared_by_all(self, values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
        with self._lock:
            if not self._count:
                self._before.enter_context(self._set(values))
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._before.close()


def _put_back(config: Any, name: str, before: Any, ours: Any) -> None:
    """Set it to what it was, unless a pass of the program's has set it to something else meanwhile."""
    if getattr(config, name) == ours:
        setattr(config, name, before)


def _is_for_a_file() -> bool:
    """Check that what is compiled now is to be written to a file, for which torch takes it from its caches."""
    bundled = getattr(sys.modules.get(FUNCTORCH_CONFIG), "bundled_autograd_cache", False)
    if bundled or getattr(getattr(sys.modules.get(_VIRTUALIZED), "V", None), "aot_compilation", False):
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "standalone_compile" and frame.f_globals.get("__name__") == _STANDALONE:
            return True
        frame = frame.f_back
    return False


def _placed(setting: tuple[str, str, Any]) -> tuple[Any, str, Any]:
    """What has that setting, its name there, and what it is to be.

    Raises:
        AttributeError: this torch does not have it.
    """
    module, name, value = setting
    owner, own = _owner(module, name), name.rpartition(".")[2]
    getattr(owner, own)
    return owner, own, value


def _owner(module: str, name: str) -> Any:
    """The part of a module of settings that has this one."""
    part = name.rpartition(".")[0]
    config = importlib.import_module(module)
    return attrgetter(part)(config) if part else config
