"""From the TARGET of a command line to a :class:`Workload` or a :class:`Script`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gradscope.errors import TargetError, UsageError, WorkloadError
from gradscope.workload.definition import Workload, workload_from
from gradscope.workload.describe import describe
from gradscope.workload.script import Script, find_module, import_path, locate_module
from gradscope.workload.source import FACTORY, compile_file, file_kind, parse, uses_relative_import
from gradscope.workload.step import is_placed, resolve_device

_GIVE = "Give a file, file.py:function, package.module:function, or -m package.module."


def load_target(
    target: str,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    device: str = "auto",
    seed: int | None = None,
) -> Workload | Script:
    """Load what the user named.

    Args:
        target: ``model.py``, ``model.py:name``, ``package.module:name``, or with ``module`` a dotted name.
        args: given to the factory, as strings; or the script's ``sys.argv[1:]``. A model file sees them in
            ``sys.argv`` too, while it is imported and its factory called.
        module: run ``target`` as ``python -m`` would.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; where a workload's model is moved to. ``"auto"``
            leaves a model that is on another device than the CPU where it is. A script chooses its own.
        seed: of Python, NumPy and torch, set before any of the user's code runs. None leaves them.

    Returns:
        A workload, its model on the device; or a script that has not been run.

    Raises:
        TargetError: there is no such file, module or function, or the file is not valid Python.
        WorkloadError: the factory gave something that is not a workload.
        UsageError: the arguments do not fit the factory, or the device is not there.
        BaseException: whatever the user's own code raises while it is imported or its factory runs.
    """
    resolve_device(device)  # said before the user's code spends minutes building a model
    if seed is not None:
        _seed(seed)
    loaded = _load_module_script(target, args) if module else _load(target, args)
    if isinstance(loaded, Script):
        _check_script_device(loaded, device)
        return loaded
    with import_path(loaded.folder):
        _place(loaded, device)
    return loaded


def _load(target: str, args: Sequence[str]) -> Workload | Script:
    head, name = _split(target)
    path = Path(head)
    if path.is_dir():
        raise TargetError(_folder_message(path))
    if not path.exists() and _looks_like_module(head):
        if name is None:
            raise TargetError(_no_file_message(path))
        return _from_module(target, head, name, args)
    if not path.exists():
        raise TargetError(_no_file_message(path))
    kind = file_kind(path)
    if name is None and kind == "script":
        return Script(path, None, tuple(args), target)
    return _from_file(target, path, name or (FACTORY if kind == "workload" else None), args)


def _load_module_script(target: str, args: Sequence[str]) -> Script:
    if ":" in target:
        raise UsageError(f"-m runs a whole module as a script.\nTo profile a function of it leave out -m: {target}")
    if not _looks_like_module(target):
        raise UsageError(f"-m takes a dotted module name, not {target}.\nTo run a file leave out -m.")
    with import_path(Path.cwd()):
        origin = locate_module(target).origin
    if origin and origin.endswith(".py"):
        parse(Path(origin))
    return Script(None, target, tuple(args), target)


def _split(target: str) -> tuple[str, str | None]:
    if Path(target).exists():
        return target, None
    head, colon, name = target.rpartition(":")
    if not colon:
        return target, None
    if not head or not name:
        raise TargetError(f"{target} lacks a name {'after' if head else 'before'} the colon.\n{_GIVE}")
    return head, name


def _looks_like_module(text: str) -> bool:
    return not text.endswith(".py") and all(part.isidentifier() for part in text.split("."))


# --------------------------------------------------------------------------------------------------------------------
# Importing
# --------------------------------------------------------------------------------------------------------------------


def _from_file(target: str, path: Path, name: str | None, args: Sequence[str]) -> Workload:
    folder = path.resolve().parent
    dotted = None
    if uses_relative_import(path) and (folder / "__init__.py").exists():
        folder, dotted = _package_of(path.resolve())
    with import_path(folder), _argv(str(path), args):
        module = importlib.import_module(dotted) if dotted else _import_file(path)
        return _workload_of(module, str(path), name, args, target, folder)


def _from_module(target: str, module_name: str, name: str, args: Sequence[str]) -> Workload:
    folder = Path.cwd()
    with import_path(folder):
        spec = find_module(module_name)
        if spec is None:
            raise TargetError(
                f"no module named {module_name} in {folder} or on Python's path.\n"
                "Start gradscope in the folder that holds the package, or give the file: path/to/file.py:function"
            )
        if spec.origin and spec.origin.endswith(".py"):
            parse(Path(spec.origin))
        with _argv(spec.origin or module_name, args):
            return _workload_of(importlib.import_module(module_name), module_name, name, args, target, folder)


def _import_file(path: Path) -> ModuleType:
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:  # a suffix that no importer knows
        loader = importlib.machinery.SourceFileLoader(name, str(path.resolve()))
        spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look classes up here, and a helper beside the file may import it back.
    sys.modules[name] = module
    try:
        # Not by its loader: a cached .pyc of the same second and size would be an older version of the file.
        exec(compile_file(path.resolve()), module.__dict__)  # noqa: S102 (running the user's file is the purpose)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _module_name(path: Path) -> str:
    """The name under which ``import`` would find the file, so that workers can unpickle its classes; else a new one.

    Called with the file's folder first on ``sys.path``.
    """
    stem = path.stem
    if stem.isidentifier() and stem not in sys.modules:
        spec = importlib.util.find_spec(stem)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve():
            return stem
    plain = "".join(character if character.isalnum() else "_" for character in stem)
    name = f"gradscope_target_{plain}"
    number = 1
    while name in sys.modules:
        number += 1
        name = f"gradscope_target_{plain}_{number}"
    return name


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder above the file's outermost package, and the file's dotted name seen from there."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


@contextlib.contextmanager
def _argv(program: str, args: Sequence[str]) -> Iterator[None]:
    # A model file may parse sys.argv; what it must never see is gradscope's own command line.
    saved = sys.argv
    sys.argv = [program, *args]
    try:
        yield
    finally:
        sys.argv = saved


# --------------------------------------------------------------------------------------------------------------------
# From a module to a workload
# --------------------------------------------------------------------------------------------------------------------


def _workload_of(
    module: ModuleType, file: str, name: str | None, args: Sequence[str], target: str, folder: Path
) -> Workload:
    if name is None:
        made = workload_from(_module_level(module, file), where=file, target=target)
    else:
        where = f"{file}: {name}()"
        value = _call(_named(module, file, name), where, args)
        made = workload_from(value, where=where, target=target)
    made.folder = folder
    return made


def _module_level(module: ModuleType, file: str) -> dict[str, Any]:
    names = vars(module)
    missing = [name for name in ("model", "batch") if name not in names]
    if missing:
        raise WorkloadError(
            f"{file} was taken for a model file, but left no {missing[0]!r} behind when it was imported."
        )
    parts = {"model": names["model"], "batch": names["batch"]}
    # A tensor or float of that name is a left-over of the user's own, not the function that is meant here.
    if callable(names.get("loss")):
        parts["loss"] = names["loss"]
    if isinstance(names.get("optimizer"), torch.optim.Optimizer):
        parts["optimizer"] = names["optimizer"]
    return parts


def _named(module: ModuleType, file: str, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise TargetError(_no_function_message(module, file, name))
        value = getattr(value, part)
    return value


def _call(factory: Any, where: str, args: Sequence[str]) -> Any:
    if isinstance(factory, Workload):
        return factory
    name = where.removesuffix("()")
    if isinstance(factory, type) and issubclass(factory, nn.Module):
        raise WorkloadError(
            f"{name} is a model class, which has no batch.\nName a function that returns (model, batch)."
        )
    if isinstance(factory, nn.Module) or not callable(factory):
        raise WorkloadError(
            f"{name} is {describe(factory)}, not a function.\nName a function that returns (model, batch)."
        )
    _check_arguments(factory, name, args)
    try:
        return factory(*args)
    except WorkloadError as error:  # the user built a gradscope.Workload
        raise WorkloadError(f"{where}: {error}") from None


def _check_arguments(factory: Callable[..., Any], name: str, args: Sequence[str]) -> None:
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # some built-in callables have none: the call will tell
        return
    if args and not signature.parameters:
        raise UsageError(f"{name}() takes no arguments, but was given: {' '.join(args)}")
    try:
        signature.bind(*args)
    except TypeError as error:
        given = f"given: {' '.join(args)}" if args else "none were given after '--'"
        raise UsageError(f"the arguments do not fit {name}{signature}: {error}; {given}.") from None


# --------------------------------------------------------------------------------------------------------------------
# Device and seed
# --------------------------------------------------------------------------------------------------------------------


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _place(workload: Workload, device: str) -> None:
    if device == "auto" and is_placed(workload.model):
        return  # over several devices perhaps
    where = resolve_device(device)
    workload.model.to(where)
    if isinstance(workload.loss, nn.Module):
        workload.loss.to(where)


def _check_script_device(script: Script, device: str) -> None:
    if device == "auto" or (device == "cpu" and not torch.cuda.is_available()):
        return
    raise UsageError(
        f"--device {device} is for model files; {script.target} is a training script and chooses its own device.\n"
        "Leave it out, or give the script an option of its own after '--'."
    )


# --------------------------------------------------------------------------------------------------------------------
# Messages
# --------------------------------------------------------------------------------------------------------------------


def _folder_message(folder: Path) -> str:
    files = sorted(str(path) for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not files:
        return f"{folder} is a folder, without Python files.\n{_GIVE}"
    shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return f"{folder} is a folder.\nName a file in it: {shown}"


def _no_file_message(path: Path) -> str:
    head = f"there is no file {path}."
    folder = path.parent
    if not folder.is_dir():
        return f"{head}\nIts folder does not exist either: {os.path.abspath(folder)}"
    files = [other.name for other in folder.glob("*.py")]
    close = difflib.get_close_matches(path.name, files, n=1) or [f for f in files if f == f"{path.name}.py"]
    if close:
        return f"{head}\nDid you mean {folder / close[0]}?"
    with import_path(Path.cwd()):
        is_module = _looks_like_module(str(path)) and find_module(str(path)) is not None
    if is_module:
        return f"{head}\nTo run the module {path} as a script: -m {path}. To profile a model of it: {path}:function"
    return f"{head}\n{_GIVE}"


def _no_function_message(module: ModuleType, file: str, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    close = difflib.get_close_matches(name, list(vars(module)), n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    if not own:
        return f"{file} has no function {name}, nor any other.{guess}"
    shown = ", ".join(own[:8]) + (", ..." if len(own) > 8 else "")
    return f"{file} has no function {name}.{guess}\nIts functions: {shown}"
