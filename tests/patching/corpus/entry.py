"""One model of the corpus, and what must be found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A model that stands for code found in the wild.

    ``sites`` are the expected (module path, recipe) pairs, in any order; the path is that of the module in whose
    forward the pattern's source stands. ``refused`` is a part of the reason where something looks like a pattern and
    must be left alone.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any]]  # (model, batch), as gradscope.profile takes them
    sites: tuple[tuple[str, str], ...] = ()
    loss: Callable[[Any, Any], Tensor] | None = (
        None  # loss(output, batch); None: the output is or holds it, or the mean
    )
    refused: str = ""
    train: bool = True
