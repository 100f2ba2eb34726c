"""Short words for a value of the user's, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def describe(value: Any) -> str:
    """``a float32 tensor of shape (8, 10) with requires_grad=False``, ``a list of 2``, ``None``, ``a Net``."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        # A size prints as torch.Size([8, 10]); as a tuple it is what the user wrote.
        return f"{_article(dtype)} tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if isinstance(value, (list, tuple, Mapping)):
        return f"{_article(name)} of {len(value)}"
    return _article(name)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
