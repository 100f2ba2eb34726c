"""What the tests of rules share."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gradscope.patching import facts
from gradscope.patching.predict import Saving, kept_bytes
from gradscope.patching.sites import Site


@pytest.fixture(autouse=True)
def certain_predictions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes save 2 ms wherever they fit: a micro-run on a busy machine may say anything.

    How right the real ones are is for benchmarks/predictions.py. A test marked ``micro_runs`` makes them.
    """
    if request.node.get_closest_marker("micro_runs") is not None:
        return

    def predict(sites: Iterable[Site]) -> dict[Site, Saving]:
        return {site: Saving(2_000_000, kept_bytes(site.matches[0])) for site in sites if site.supported}

    monkeypatch.setattr(facts, "predict", predict)
