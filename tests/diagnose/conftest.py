"""What the tests of rules share."""

from __future__ import annotations

import pytest

from gradscope.diagnose import engine
from gradscope.kernels import pays
from gradscope.patching import places as found_places
from tests.diagnose.corpus import fixed_predictions, rules_without_floors


@pytest.fixture(autouse=True)
def certain_predictions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes save 2 ms wherever they fit: a micro-run on a busy machine may say anything.

    How right the real ones are is for benchmarks/predictions.py. A test marked ``micro_runs`` makes them.
    """
    if request.node.get_closest_marker("micro_runs") is not None:
        return

    monkeypatch.setattr(found_places, "predict", fixed_predictions)
    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)  # however long the step took


@pytest.fixture(autouse=True)
def no_floors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a test are so small that everything is below a floor; a test marked ``floors`` has them."""
    if request.node.get_closest_marker("floors") is None:
        monkeypatch.setattr(engine, "RULES", rules_without_floors())


@pytest.fixture(autouse=True)
def own_code_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models do for what is tested here, though recipes would go to torch there."""
    fewest = {name: rule for name, rule in pays.FEWEST.items() if name == "linear_cross_entropy"}
    monkeypatch.setattr(pays, "FEWEST", fewest | {"attention with dropout": {"scores": (200_000, 200_000)}})
