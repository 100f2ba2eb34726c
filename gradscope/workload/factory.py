"""What a TARGET names, imported and ready to be made into a :class:`Workload`: once, or once for each batch size."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gradscope.errors import TargetError, UsageError, WorkloadError
from gradscope.workload.definition import Workload, describe, workload_from
from gradscope.workload.script import import_path
from gradscope.workload.step import is_placed, resolve_device

#: The parameter by which a factory is told how many samples its batch shall hold.
BATCH_SIZE = "batch_size"


@dataclass(frozen=True, eq=False)
class Factory:
    """An imported model file, and the function of it that gives the workload.

    Attributes:
        target: as the user wrote it.
        module: the imported file or module.
        file: its name for messages.
        program: ``sys.argv[0]`` while the function runs.
        name: of the function, dots reach into classes; None: the module's own ``model`` and ``batch``.
        args: given to the function, as strings.
        folder: comes first on ``sys.path`` while the function runs.
        device: where the model is moved to; None: nowhere if it is on another device than the CPU already, else to
            CUDA where there is any.
        seed: see :meth:`make`.
    """

    target: str
    module: ModuleType
    file: str
    program: str
    name: str | None
    args: tuple[str, ...]
    folder: Path
    device: torch.device | None
    seed: int | None

    @property
    def takes_batch_size(self) -> bool:
        """Check that the function has a parameter ``batch_size`` that ``args`` leave free."""
        if self.name is None:
            return False
        return accepts_batch_size(_named(self.module, self.file, self.name), self.args)

    def make(self, batch_size: int | None = None) -> Workload:
        """The workload, its model on the device; each call of a function gives a new one.

        Args:
            batch_size: given to a function that takes it, and the seed is set before: the workloads of several sizes
                differ in nothing else.

        Raises:
            TargetError: the module has no such function.
            WorkloadError: what it gave is not a workload.
            UsageError: the arguments do not fit the function.
            BaseException: whatever the function raises.
        """
        given = {} if batch_size is None else {BATCH_SIZE: batch_size}
        if given and self.seed is not None:
            seed_generators(self.seed)
        with import_path(self.folder), argv(self.program, self.args):
            made = self._made(given)
            made.folder = self.folder
            _place(made, self.device)
        return made

    def _made(self, given: dict[str, int]) -> Workload:
        if self.name is None:
            return workload_from(_module_level(self.module, self.file), where=self.file, target=self.target)
        where = f"{self.file}: {self.name}({', '.join(f'{key}={value}' for key, value in given.items())})"
        value = _call(_named(self.module, self.file, self.name), f"{self.file}: {self.name}", self.args, given)
        return workload_from(value, where=where, target=self.target)


def accepts_batch_size(factory: Any, args: Sequence[str] = ()) -> bool:
    """Check that ``factory(*args, batch_size=...)`` fits its signature, which names it: ``**kwargs`` does not."""
    if isinstance(factory, (nn.Module, Workload)) or not callable(factory):
        return False
    try:
        signature = inspect.signature(factory)
        found = signature.parameters.get(BATCH_SIZE)
        if found is None or found.kind not in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY):
            return False
        return BATCH_SIZE not in signature.bind_partial(*args).arguments
    except (ValueError, TypeError):  # no signature, or arguments that the call itself will complain about
        return False


@contextlib.contextmanager
def argv(program: str, args: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` of a model file, which may parse it; it must never see gradscope's own command line."""
    saved = sys.argv
    sys.argv = [program, *args]
    try:
        yield
    finally:
        sys.argv = saved


def seed_generators(seed: int) -> None:
    """Seed Python, torch, and NumPy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _place(workload: Workload, device: torch.device | None) -> None:
    if device is None and is_placed(workload.model):
        return  # over several devices perhaps
    where = device or resolve_device("auto")
    workload.model.to(where)
    if isinstance(workload.loss, nn.Module):
        workload.loss.to(where)


def _module_level(module: ModuleType, file: str) -> dict[str, Any]:
    names = vars(module)
    missing = [name for name in ("model", "batch") if name not in names]
    if missing:
        raise WorkloadError(f"{file} was loaded as a model file, but importing it defined no {missing[0]!r}.")
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


def _call(factory: Any, name: str, args: Sequence[str], given: dict[str, int]) -> Any:
    if isinstance(factory, Workload):
        return factory
    if isinstance(factory, type) and issubclass(factory, nn.Module):
        raise WorkloadError(
            f"{name} is a model class, which has no batch.\nName a function that returns (model, batch)."
        )
    if isinstance(factory, nn.Module) or not callable(factory):
        raise WorkloadError(
            f"{name} is {describe(factory)}, not a function.\nName a function that returns (model, batch)."
        )
    _check_arguments(factory, name, args, given)
    try:
        return factory(*args, **given)
    except WorkloadError as error:  # the user built a gradscope.Workload
        raise WorkloadError(f"{name}(): {error}") from None


def _check_arguments(factory: Callable[..., Any], name: str, args: Sequence[str], given: dict[str, int]) -> None:
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # some built-in callables have none: the call will tell
        return
    if args and not signature.parameters:
        raise UsageError(f"{name}() takes no arguments, but was given: {' '.join(args)}")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        shown = f"given: {' '.join(args)}" if args else "none were given after '--'"
        raise UsageError(f"the arguments do not match {name}{signature}: {error}; {shown}.") from None


def _no_function_message(module: ModuleType, file: str, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    close = difflib.get_close_matches(name, list(vars(module)), n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    if not own:
        return f"{file} has no function {name}, and no other function either.{guess}"
    shown = ", ".join(own[:8]) + (", ..." if len(own) > 8 else "")
    return f"{file} has no function {name}.{guess}\nIts functions: {shown}"
