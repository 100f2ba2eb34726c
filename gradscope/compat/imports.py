"""To be told when the program imports a module."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def once_imported(name: str, then: Callable[[], object]) -> Iterator[None]:
    """Call a function as soon as a module is there: now, or when the program imports it before the block is left."""
    if name in sys.modules:
        then()
        yield
        return
    finder = _AtImport(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.forget()


class _AtImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True  # the finders behind this one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original
            self.forget()
            original(module)
            self._then()

        loader.exec_module = exec_module
        return spec

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
