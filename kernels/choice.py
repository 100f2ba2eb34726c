"""Which of several ways a recipe takes for given arguments, and why not the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from gradscope.kernels.check import refuse

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs; ``print(choice)`` says why it, and why not each of the others."""

    backend: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)  # backend -> why not

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join([*lines, *(f"not {name}: {why}" for name, why in self.refused.items())])


def choose(function: str, wanted: str, reasons: Mapping[str, str], against: Mapping[str, str | None]) -> Choice:
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
        refuse(function, "backend", repr(wanted), " or ".join(repr(name) for name in ("auto", *reasons)))
    if wanted != "auto":
        why = against.get(wanted)
        if why is not None:
            raise ValueError(f"{function}: backend={wanted!r} cannot run here: {why}")
        return Choice(wanted, "asked for")
    refused: dict[str, str] = {}
    for name, reason in reasons.items():
        why = against.get(name)
        if why is None:
            return Choice(name, reason, refused)
        refused[name] = why
    raise ValueError(
        f"{function}: nothing can run here: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
    )


class Explained(Generic[P, R]):
    """A function with ``explain``: the same arguments, but it says what would run instead of running it."""

    def __init__(self, function: Callable[P, R], explain: Callable[P, Choice]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.explain = explain

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)


def explained_by(explain: Callable[P, Choice]) -> Callable[[Callable[P, R]], Explained[P, R]]:
    """Give a function its ``explain``."""
    return lambda function: Explained(function, explain)
