"""What the tests of patching share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gradscope.kernels import pays
from gradscope.patching.match.match import why_idle
from gradscope.patching.match.matchers import embedding, linear_cross_entropy
from gradscope.recording.graph import Value


@pytest.fixture
def nothing_is_idle(own_code_at_every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's vocabulary is worth replacing too."""
    monkeypatch.setattr(linear_cross_entropy, "why_idle", why_idle)
    monkeypatch.setattr(embedding, "FEWEST_ON_CPU", 0)
    monkeypatch.setattr(embedding, "FEWEST_ROWS_A_TOKEN", 0)


@pytest.fixture(autouse=True)
def own_code_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models do for what is tested here; a place with a small head stays idle, which some tests are of."""
    rule = pays.FEWEST["linear_cross_entropy"]

    def few(recipe: str, on: Value, **amounts: int) -> str:
        with monkeypatch.context() as measured:
            measured.setattr(pays, "FEWEST", {"linear_cross_entropy": rule})
            return why_idle(recipe, on, **amounts)

    monkeypatch.setattr(pays, "FEWEST", {})
    monkeypatch.setattr(linear_cross_entropy, "why_idle", few)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Every plan collects garbage, and need not look through what was there before: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
