"""From the TARGET of a command line to a :class:`Workload`, a :class:`Factory` of them, or a :class:`Script`."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from gradscope.errors import TargetError, UsageError
from gradscope.safe_text import shown_path
from gradscope.workload.definition import Workload
from gradscope.workload.factory import Factory, argv, seed_generators
from gradscope.workload.script import Script, find_module, import_path, locate_module
from gradscope.workload.source import FACTORY, compile_file, file_kind, parse, uses_relative_import
from gradscope.workload.step import resolve_device

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
    loaded = load_factory(target, args, module=module, device=device, seed=seed)
    return loaded if isinstance(loaded, Script) else loaded.make()


def load_factory(
    target: str,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    device: str = "auto",
    seed: int | None = None,
) -> Factory | Script:
    """Import what the user named, and make no workload of it yet: as :func:`load_target` otherwise."""
    where = resolve_device(device)  # said before the user's code spends minutes building a model
    if seed is not None:
        seed_generators(seed)
    given = _Given(target, tuple(args), None if device == "auto" else where, seed)
    loaded = _load_module_script(target, args) if module else _load(given)
    if isinstance(loaded, Script):
        _check_script_device(loaded, device)
    return loaded


@dataclass(frozen=True, slots=True)
class _Given:
    """What the user asked for, on its way to the factory."""

    target: str
    args: tuple[str, ...]
    device: torch.device | None
    seed: int | None

    def factory(self, module: ModuleType, file: str, program: str, name: str | None, folder: Path) -> Factory:
        return Factory(self.target, module, file, program, name, self.args, folder, self.device, self.seed)


def _load(given: _Given) -> Factory | Script:
    target = given.target
    head, name = _split(target)
    path = Path(head)
    if os.path.isdir(path):
        raise TargetError(_folder_message(path))
    exists = os.path.exists(path)
    if not exists and _looks_like_module(head):
        if name is None:
            raise TargetError(_no_file_message(path))
        return _from_module(given, head, name)
    if not exists:
        raise TargetError(_no_file_message(path))
    kind = file_kind(path)
    if name is None and kind == "script":
        return Script(path, None, given.args, target)
    return _from_file(given, path, name or (FACTORY if kind == "workload" else None))


def _load_module_script(target: str, args: Sequence[str]) -> Script:
    if ":" in target:
        raise UsageError(f"-m runs a whole module as a script.\nTo profile one of its functions, omit -m: {target}")
    if not _looks_like_module(target):
        raise UsageError(f"-m takes a dotted module name, not {target}.\nTo run a file, omit -m.")
    with import_path(Path.cwd()):
        origin = locate_module(target).origin
    if origin and origin.endswith(".py"):
        parse(Path(origin))
    return Script(None, target, tuple(args), target)


def _split(target: str) -> tuple[str, str | None]:
    if os.path.exists(target):  # Path.exists() raises where a name is too long, or a folder closed to us
        return target, None
    head, colon, name = target.rpartition(":")
    if not colon:
        return target, None
    if not head or not name:
        raise TargetError(f"{target} has no name {'after' if head else 'before'} the colon.\n{_GIVE}")
    return head, name


def _looks_like_module(text: str) -> bool:
    return not text.endswith(".py") and all(part.isidentifier() for part in text.split("."))


# --------------------------------------------------------------------------------------------------------------------
# Importing
# --------------------------------------------------------------------------------------------------------------------


def _from_file(given: _Given, path: Path, name: str | None) -> Factory:
    folder = path.resolve().parent
    dotted = None
    if uses_relative_import(path) and (folder / "__init__.py").exists():
        folder, dotted = _package_of(path.resolve())
    with import_path(folder), argv(str(path), given.args):
        module = importlib.import_module(dotted) if dotted else _import_file(path)
    return given.factory(module, str(path), str(path), name, folder)


def _from_module(given: _Given, module_name: str, name: str) -> Factory:
    folder = Path.cwd()
    with import_path(folder):
        spec = find_module(module_name)
        if spec is None:
            raise TargetError(
                f"no module named {module_name} in {folder} or on Python's path.\nStart gradscope in the "
                "folder that contains the package, or give the file: path/to/file.py:function"
            )
        if spec.origin and spec.origin.endswith(".py"):
            parse(Path(spec.origin))
        program = spec.origin or module_name
        with argv(program, given.args):
            module = importlib.import_module(module_name)
    return given.factory(module, module_name, program, name, folder)


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


def _check_script_device(script: Script, device: str) -> None:
    if device == "auto" or (device == "cpu" and not torch.cuda.is_available()):
        return
    raise UsageError(
        f"--device {device} is for model files; {script.target} is a training script and chooses "
        "its own device.\nOmit it, or pass the script's own option after '--'."
    )


# --------------------------------------------------------------------------------------------------------------------
# Messages
# --------------------------------------------------------------------------------------------------------------------


def _folder_message(folder: Path) -> str:
    files = sorted(str(path) for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not files:
        return f"{folder} is a folder without Python files.\n{_GIVE}"
    shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return f"{folder} is a folder.\nName a file in it: {shown}"


def _no_file_message(path: Path) -> str:
    head = f"there is no file {shown_path(path)}."
    folder = path.parent
    if not os.path.isdir(folder):
        return f"{head}\nIts folder does not exist either: {shown_path(os.path.abspath(folder))}"
    files = [other.name for other in folder.glob("*.py")]
    close = difflib.get_close_matches(path.name, files, n=1) or [f for f in files if f == f"{path.name}.py"]
    if close:
        return f"{head}\nDid you mean {folder / close[0]}?"
    with import_path(Path.cwd()):
        is_module = _looks_like_module(str(path)) and find_module(str(path)) is not None
    if is_module:
        return f"{head}\nTo run the module {path} as a script: -m {path}. To profile a model of it: {path}:function"
    return f"{head}\n{_GIVE}"
