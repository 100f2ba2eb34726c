"""What the tests of patching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Every plan collects garbage, and need not look through what was there before: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
