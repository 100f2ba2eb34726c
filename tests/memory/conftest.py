"""Fixtures of the memory suite: a process with no garbage in it, and ops on one thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Nothing of an earlier test is alive, and no collection in the middle of a step frees what was."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
