"""What rules make their findings of: what is promised, and in which words."""

from __future__ import annotations

import pytest

from gradscope.diagnose.findings import Estimate, at_most, make_finding, of_step, only, parts_of, several, where
from gradscope.tables import Finding
from tests.diagnose.timing_cases import MS, made_case

STEP = 100 * MS


def _made(gain: Estimate | None, *layers: str | None, cost_ns: int = 0) -> Finding:
    case = made_case(wall=STEP)
    return make_finding(
        "a-rule", case, gain, layers=layers, line=None, message="m", evidence="e", advice="A.", code="", cost_ns=cost_ns
    )


def _promised(found: Finding) -> tuple[int | None, ...]:
    return found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns, found.predicted_saving_bytes


@pytest.mark.parametrize(
    ("gain", "promised", "severity"),
    [
        (None, (None, None, None, None), "info"),
        (parts_of(20 * MS, (0.0, 0.5, 1.0), 7), (0, 10 * MS, 20 * MS, 7), "critical"),
        (parts_of(6 * MS, (0.1, 0.5, 0.9)), (600_000, 3 * MS, 5_400_000, None), "warning"),
        (at_most(20 * MS), (None, None, 20 * MS, None), "info"),
        (Estimate(-5, -8, -3, -1), (None, None, None, None), "info"),
        (Estimate(bytes=9), (None, None, None, 9), "info"),
    ],
    ids=["nothing", "parts", "less", "at most", "a loss", "memory"],
)
def test_a_gain_is_what_is_promised(gain: Estimate | None, promised: tuple[int | None, ...], severity: str) -> None:
    found = _made(gain)
    assert (_promised(found), found.severity) == (promised, severity)


def test_layers_are_told_once_and_a_cost_that_is_not_known_is_none() -> None:
    found = _made(None, "b", None, "a", "b")
    assert (found.layers, found.cost_ns) == (("b", "a"), None)
    assert _made(None, cost_ns=5).cost_ns == 5


def test_words() -> None:
    assert (several(1, "mask"), several(12, "mask")) == ("1 mask", "12 masks")
    assert of_step(5 * MS, made_case(wall=STEP)) == "5.00 ms per step (5.0 %)"
    assert (only(["a:1", "a:1"]), only(["a:1", "a:2"]), only([])) == ("a:1", None, None)
    assert where(["a:7"]) == "line 7"
    assert where(["a:12", "a:9"]) == "2 lines, 9 to 12"
    assert where(["a:12", "b:9"]) == "2 lines"
