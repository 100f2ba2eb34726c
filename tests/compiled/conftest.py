"""What tests that compile in their own process share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def inductor() -> Iterator[None]:
    """Inductor in this process alone, and its paths as before."""
    from torch._inductor import config

    paths = list(sys.path)
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    sys.path[:] = paths
