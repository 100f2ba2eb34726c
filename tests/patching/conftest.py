"""What the tests of patching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gradscope.patching.matchers import embedding, linear_cross_entropy


@pytest.fixture
def nothing_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's vocabulary is worth replacing too."""
    monkeypatch.setattr(linear_cross_entropy, "FEWEST_ON_CPU", 0)
    monkeypatch.setattr(embedding, "FEWEST_ON_CPU", 0)
    monkeypatch.setattr(embedding, "FEWEST_ROWS_A_TOKEN", 0)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Every plan collects garbage, and need not look through what was there before: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
