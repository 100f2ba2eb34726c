"""What the tests of patching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gradscope.patching.matchers import linear_cross_entropy


@pytest.fixture
def few_logits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's logits are worth replacing too."""
    monkeypatch.setattr(linear_cross_entropy, "FEWEST_ON_CPU", 0)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Every plan collects garbage, and need not look through what was there before: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
