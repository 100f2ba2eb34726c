"""Which of several ways a recipe takes for given arguments, and why not the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from gradscope.compat import tracing_state
from gradscope.kernels.check import ArgumentError, refuse
from gradscope.kernels.forms import Form, form_of
from gradscope.kernels.plain import why_torch

P = ParamSpec("P")
R = TypeVar("R")
_TORCHS = frozenset({"torch", "attention", "math", "flash", "efficient", "cudnn"})  # backends without code of ours


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that runs; ``print(choice)`` says why it, and why not each of the others."""

    backend: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)  # backend -> why not

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join([*lines, *(f"not {name}: {why}" for name, why in self.refused.items())])


def choose(function: str, wanted: str, reasons: Mapping[str, str], against: Mapping[str, str | None]) -> BackendChoice:
    """The first backend that nothing speaks against, or the one that is wanted.

    Args:
        function: name for messages.
        wanted: ``"auto"`` or the name of a backend.
        reasons: backend -> why it is taken where it can be; the best first.
        against: backend -> why it cannot run here; ``None`` or missing where it can.

    Raises:
        ValueError: ``wanted`` is no backend, or cannot run here; or none can.
    """
    if wanted != "auto" and wanted not in reasons:
        refuse(function, "backend", repr(wanted), _one_of(reasons))
    if wanted != "auto":
        why = against.get(wanted)
        if why is not None:
            raise ValueError(f"{function}: backend={wanted!r} cannot run here: {why}")
        return BackendChoice(wanted, "asked for")
    refused: dict[str, str] = {}
    for name, reason in reasons.items():
        why = against.get(name)
        if why is None:
            return BackendChoice(name, reason, refused)
        refused[name] = why
    raise ValueError(
        f"{function}: nothing can run here: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
    )


def _one_of(backends: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in ("auto", *backends))


class OrTorch(Generic[P, R]):
    """A recipe's function, which is torch's composition where :func:`why_torch` says so. Pickled by its name."""

    def __init__(self, function: Callable[P, R], plain: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._plain = function, plain

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        why = why_torch((*args, *kwargs.values()) if kwargs else args)
        if why is None:
            return self._function(*args, **kwargs)
        self._check(why, kwargs)
        return self._plain(*args, **kwargs)

    def _check(self, why: str, kwargs: Mapping[str, Any]) -> BackendChoice:
        """The choice where own code cannot run; ``ValueError`` where that is what is asked for."""
        return BackendChoice("torch", f"torch's operations, for {why}")

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined, no-any-return]


class Explained(OrTorch[P, R]):
    """One with ``explain``: the same arguments, but it says what would run instead of running it.

    Its function gives None where torch's composition is the choice, which then runs; arguments of the same form are
    not looked at again, for that takes longer than torch's operations of so few elements.
    """

    def __init__(
        self,
        function: Callable[P, R | None],
        explain: Callable[P, BackendChoice],
        plain: Callable[P, R],
        backends: Iterable[str],
    ) -> None:
        super().__init__(function, plain)  # type: ignore[arg-type]
        returned = inspect.signature(plain).return_annotation  # without the None
        self.__signature__ = inspect.signature(function).replace(return_annotation=returned)
        self._explain, self._backends = explain, tuple(backends)
        self._torchs: set[Form] = set()
        _explained.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        traced = torch.compiler.is_compiling() or tracing_state() is not None
        form = None if traced or not self._torchs else form_of(args, kwargs)  # of a recipe that never goes there, none
        if form is not None and form in self._torchs:
            try:
                return self._plain(*args, **kwargs)
            except (IndexError, RuntimeError, ValueError):
                self._name(args, kwargs)
                raise
        why = why_torch((*args, *kwargs.values()) if kwargs else args)
        if why is not None:
            self._check(why, kwargs)
            return self._plain(*args, **kwargs)
        found: R | None = self._function(*args, **kwargs)
        if found is not None:
            return found
        if not traced:
            self._remember(form_of(args, kwargs) if form is None else form)
        return self._plain(*args, **kwargs)

    def _remember(self, form: Form | None) -> None:
        if form is None:
            return
        if len(self._torchs) >= _MOST:  # several threads may have passed it together
            self._torchs.clear()
        self._torchs.add(form)

    def _name(self, args: Any, kwargs: Any) -> None:
        """Raise what the function says of arguments that torch refuses; nothing where they are right.

        Torch is not run again: what raised may be the user's, a hook or a mode, and its error is not to be lost.
        """
        if why_torch((*args, *kwargs.values())) is None:
            try:
                self._function(*args, **kwargs)
            except ArgumentError as error:
                raise error from None

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> BackendChoice:
        """What would run with these arguments, and why."""
        why = why_torch((*args, *kwargs.values()))
        return self._explain(*args, **kwargs) if why is None else self._check(why, kwargs)

    def _check(self, why: str, kwargs: Mapping[str, Any]) -> BackendChoice:
        wanted = kwargs.get("backend", "auto")
        name = self.__name__  # type: ignore[attr-defined]
        own = [each for each in self._backends if each not in _TORCHS]
        if wanted in own:
            raise ValueError(f"{name}: backend={wanted!r} cannot run here: {why}")
        if wanted != "auto" and wanted not in self._backends:
            refuse(name, "backend", repr(wanted), _one_of(self._backends))
        return BackendChoice("torch", f"torch's operations, for {why}", dict.fromkeys(own, why))


_MOST = 1_000  # forms: sequences of any length, say
_explained: list[Explained[Any, Any]] = []


def forget() -> None:
    """Look at all arguments anew: after a change of what choices go by, as ``TRITON_INTERPRET``."""
    for each in _explained:
        each._torchs.clear()


def or_torch(plain: Callable[P, R]) -> Callable[[Callable[P, R]], OrTorch[P, R]]:
    """Give a function torch's composition in its place, for all that :func:`why_torch` names."""
    return lambda function: OrTorch(function, plain)


def explained_by(
    explain: Callable[P, BackendChoice], plain: Callable[P, R], backends: Iterable[str]
) -> Callable[[Callable[P, R | None]], Explained[P, R]]:
    """Give a function its ``explain``, and torch's composition in its place for all that :func:`why_torch` names.

    And where the function gives None.

    Args:
        plain: the same arguments; torch's operations alone.
        backends: their names; those of torch's kernels and compositions too.
    """
    return lambda function: Explained(function, explain, plain, backends)
