"""Arguments of recipes: what is wrong, what it should be, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor


class ArgumentError(ValueError, RuntimeError):
    """An argument that a recipe was given does not fit.

    torch raises ``ValueError`` for some arguments and ``RuntimeError`` for most: code that catches either of its
    functions' errors catches the recipes' as well.
    """


class NoSuchIndexError(ArgumentError, IndexError):
    """A target that is no class, a token that there is not: torch raises ``IndexError``."""


FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def refuse(
    function: str, argument: str, got: object, expected: str, error: type[ArgumentError] = ArgumentError
) -> NoReturn:
    """Raise :class:`ArgumentError` naming the argument, what it is and what it should be."""
    raise error(f"{function}: {argument} is {got}; expected {expected}")


def shape_text(tensor: Tensor) -> str:
    """``of shape (8, 12)``."""
    return f"of shape {tuple(tensor.shape)}"


def dtype_text(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def require_dtype(function: str, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype] = FLOATING) -> None:
    """Raise :class:`ArgumentError` unless the tensor's dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        expected = " or ".join(dtype_text(dtype) for dtype in allowed)
        refuse(function, argument, f"of dtype {dtype_text(tensor.dtype)}", expected)


def require_same_device(function: str, like: tuple[str, Tensor], **others: Tensor | None) -> None:
    """Raise :class:`ArgumentError` unless all tensors are on the device of ``like``."""
    name, tensor = like
    for other, value in others.items():
        if value is not None and value.device != tensor.device:
            refuse(function, other, f"on {value.device}", f"{tensor.device}, where {name} is")


def require_one_of(function: str, argument: str, value: str, allowed: Sequence[str]) -> None:
    """Raise :class:`ArgumentError` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        refuse(function, argument, repr(value), " or ".join(repr(item) for item in allowed))


def require_range(
    function: str,
    argument: str,
    value: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``low <= value <= high``; an open end is excluded. NaN is refused."""
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):
        ends = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        refuse(function, argument, value, f"a number in {ends}")
