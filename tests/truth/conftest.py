"""Fixtures of the truth suite: a meter, a quiet process, and a check that nothing of gradscope stays behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from .burning import Meter


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No garbage collection inside a measured step, and ops on one thread: both would cost the layer that runs then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    torch.set_num_threads(threads)
