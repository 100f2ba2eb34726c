"""How a line of advice names a part of the user's models: from ``model``, or from the one of several that it is in."""

from __future__ import annotations

from collections.abc import Iterable

from gradscope.diagnose.case import Case


def layer_code(case: Case, path: str) -> str:
    """``model.get_submodule('encoder.0')``; "" where no name of Python's leads to it, as of a second Linear#2."""
    return _code(case, path, "get_submodule")


def parameter_code(case: Case, path: str) -> str:
    """``model.get_parameter('encoder.0.weight')``; "" where no name of Python's leads to it."""
    return _code(case, path, "get_parameter")


def models_of(case: Case, paths: Iterable[str]) -> list[str]:
    """The names of the models that these are in, each once; "" for one without a name of Python's."""
    return list(dict.fromkeys(_split(case, path)[0] for path in paths))


def below(case: Case, path: str) -> str:
    """The path as its model says it."""
    return _split(case, path)[1]


def _code(case: Case, path: str, getter: str) -> str:
    model, inner = _split(case, path)
    return f"{model}.{getter}({inner!r})" if model and inner else model


def _split(case: Case, path: str) -> tuple[str, str]:
    """The model's name and the path within it."""
    first, _, rest = path.partition(".")
    row = case.layers.get(first) if first else None
    if row is None or row.parent is not None:
        return "model", path
    return (first if first.isidentifier() else ""), rest
