"""Runs somebody's training script as Python itself would, ``__main__``, unedited, with its own tracebacks."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, TypeVar

from gradscope.errors import TargetError
from gradscope.workload.source import compile_file


def _main_module() -> ModuleType:
    return ModuleType("__main__")


@dataclass(frozen=True)
class Script:
    """A training script: a file, or a module to be run as with ``python -m``.

    Attributes:
        path: the file as the user wrote it; None for a module.
        module: dotted name; None for a file.
        args: what the script sees as ``sys.argv[1:]``.
        target: as the user wrote it, for the report.
    """

    path: Path | None
    module: str | None
    args: tuple[str, ...]
    target: str
    # A real module: pickle, multiprocessing and `import __main__` look classes up in sys.modules["__main__"].
    _main: ModuleType = field(default_factory=_main_module, init=False, repr=False, compare=False)

    @property
    def namespace(self) -> dict[str, Any]:
        """The script's global variables, live during the run and kept after it. The same dict for every run."""
        return self._main.__dict__

    def run(self) -> None:
        """Run the script to its end.

        ``sys.argv``, ``sys.path[0]``, ``__file__``, ``__spec__`` and ``__package__`` are what ``python file`` or
        ``python -m module`` would make them. On the way out ``sys.argv``, ``sys.path``, ``sys.modules["__main__"]``
        and the working folder are put back.

        Raises:
            TargetError: the file or module has gone since it was loaded.
            BaseException: whatever the script raises, ``SystemExit`` included. :func:`cut_own_frames` takes
                gradscope's frames out of its traceback.
        """
        if self.module is not None:
            self._run_module(self.module)
        else:
            assert self.path is not None
            self._run_file(self.path)

    def _run_file(self, path: Path) -> None:
        # Python shows a script its path as it was typed, "./" and all; a Path has lost that.
        given = self.target if Path(self.target) == path else str(path)
        absolute = os.path.join(os.getcwd(), given)
        folder = os.path.dirname(os.path.realpath(path))
        with _restored_interpreter(), _first_on_path(folder):
            code = compile_file(absolute)
            loader = SourceFileLoader("__main__", absolute)
            self._execute(code, given, __file__=absolute, __cached__=None, __loader__=loader)

    def _run_module(self, name: str) -> None:
        with _restored_interpreter(), _first_on_path(os.getcwd()):
            sys.argv = ["-m", *self.args]  # what an __init__.py sees while the module is being found
            spec = locate_module(name)
            if spec.parent:
                importlib.import_module(spec.parent)
            code = _module_code(spec)
            self._execute(
                code,
                spec.origin or name,
                __file__=spec.origin,
                __cached__=spec.cached,
                __loader__=spec.loader,
                __package__=spec.parent,
                __spec__=spec,
            )

    def _execute(self, code: CodeType, argument: str, **names: Any) -> None:
        namespace = self._main.__dict__
        namespace.clear()
        namespace.update(
            {"__name__": "__main__", "__doc__": None, "__package__": None, "__spec__": None, "__builtins__": builtins}
        )
        if sys.version_info < (3, 14):
            namespace["__annotations__"] = {}
        namespace.update(names)
        sys.argv = [argument, *self.args]
        sys.modules["__main__"] = self._main
        exec(code, namespace)  # noqa: S102 (running the user's script is the purpose)


def locate_module(name: str) -> ModuleSpec:
    """The spec of what ``python -m name`` runs, found without importing any package on the way.

    Raises:
        TargetError: there is no such module, or it is a package without ``__main__``.
    """
    spec = find_module(name)
    if spec is None:
        raise TargetError(
            f"no module named {name} in {os.getcwd()} or on Python's path.\nStart gradscope in the "
            "folder that contains the package, or give the file itself."
        )
    if spec.submodule_search_locations is None:
        return spec
    main = find_module(f"{name}.__main__")
    if main is None:
        raise TargetError(f"{name} is a package without __main__.py.\nName one of its modules: -m {name}.train")
    return main


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a dotted name, or None; only the folders of packages are looked at, nothing is imported."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # already imported, by code that gave it no spec
        return None
    full = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{part}"
        spec = _find_below(full, list(spec.submodule_search_locations))
    return spec


def _find_below(full: str, folders: list[str]) -> ModuleSpec | None:
    """The spec of ``full``, whose package lies in these folders and need not be imported."""
    try:
        return PathFinder.find_spec(full, folders)
    except KeyError:  # a folder without __init__.py is a package that asks for the one above it
        spec = ModuleSpec(full, None, is_package=True)
        places = (os.path.join(folder, full.rpartition(".")[2]) for folder in folders)
        spec.submodule_search_locations = [place for place in places if os.path.isdir(place)]
        return spec


def _module_code(spec: ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code: CodeType | None = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise TargetError(f"{spec.name} has no Python code to run: it is {spec.origin or 'a namespace package'}.")
    return code


@contextlib.contextmanager
def import_path(folder: Path | None) -> Iterator[None]:
    """Inside the block modules are found in ``folder`` first; None changes nothing."""
    if folder is None:
        yield
        return
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The block may have put entries of its own before it.
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """``sys.path`` as Python starts a script with: ``folder`` instead of the place that gradscope was started from."""
    if not sys.flags.safe_path:
        own = 1 if _started_gradscope(sys.path[:1]) else 0
        sys.path[:own] = [folder]
    yield  # put back by _restored_interpreter


def _started_gradscope(first: list[str]) -> bool:
    """Check that ``sys.path[0]`` is there only because gradscope itself is the program that Python was told to run."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name.partition(".")[0] == "gradscope")
    program = getattr(main, "__file__", None)
    is_command = program is not None and os.path.basename(program).partition(".")[0] == "gradscope"
    return is_command and first == [os.path.dirname(os.path.realpath(program or ""))]


@contextlib.contextmanager
def _restored_interpreter() -> Iterator[None]:
    argv, path, path_entries, main = sys.argv, sys.path, list(sys.path), sys.modules["__main__"]
    folder = os.getcwd()
    try:
        yield
    finally:
        sys.argv = argv
        path[:] = path_entries
        sys.path = path
        sys.modules["__main__"] = main
        with contextlib.suppress(OSError):  # the script may have removed the folder
            os.chdir(folder)


_E = TypeVar("_E", bound=BaseException)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Replacement ops and kernels live inside the package when installed, but run in the user's model: shown.
_SHOWN = (_PACKAGE + "recipes" + os.sep, _PACKAGE + "kernels" + os.sep)
_IMPORTLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "importlib" + os.sep


def cut_own_frames(error: _E) -> _E:
    """Take gradscope's frames out of the tracebacks of ``error`` and of all it was raised from; returns ``error``.

    A traceback that *ends* in gradscope is left whole: that error is a defect of ours, and hiding where it happened
    would help nobody.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _cut(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
    return error


def _cut(traceback: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    if entries and _is_own(entries[-1]):
        return entries[0]
    result: TracebackType | None = None
    for entry in reversed(_kept(entries)):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _kept(entries: list[TracebackType]) -> list[TracebackType]:
    kept: list[TracebackType] = []
    after_own = False
    for entry in entries:
        if _is_own(entry):
            after_own = True
        elif not (after_own and _is_import_machinery(entry)):  # an import that gradscope began, not one of the user's
            after_own = False
            kept.append(entry)
    return kept


def _is_own(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_PACKAGE) and not file.startswith(_SHOWN)


def _is_import_machinery(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(("<frozen importlib", _IMPORTLIB))
