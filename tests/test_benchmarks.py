"""Benchmarks that lean on gradscope's inside still run, and look at the state that they say they do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their folder can be imported from; what was, is forgotten after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCHMARKS) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_every_variant_measures_steps() -> None:
    import overhead
    from _common import tiny_step

    from gradscope.compat import quiet_kineto

    model, step = tiny_step("cpu", 3)
    with pytest.warns(UserWarning, match="Full backward hook is firing"), quiet_kineto():
        times = overhead.compare(model, step, "cpu", rounds=1, steps=2)
    assert set(times) == {"plain", *overhead.VARIANTS}
    assert all(len(found) == 2 and min(found) > 0 for found in times.values())


def test_analysis_is_measured_beside_key_averages() -> None:
    import analysis

    found = analysis.in_a_process(500, "cpu", True)  # it forks, which a process of many tests does not stand
    assert min(found[key] for key in ("events", "ns", "key_averages_ns")) > 0
    assert set(found) == {"events", "ns", "bytes", "list_bytes", "key_averages_ns"}


def test_every_small_cell_of_the_crossover_is_measured() -> None:
    import crossover

    from gradscope.compat import quiet_kineto

    with quiet_kineto():
        for cell in crossover.TINY:
            row = crossover.measure(cell, most=1, enough_ns=0)
            assert (row["rounds"], row["recipe"]) == (1, cell.recipe)
            assert min(row[key] for key in ("ratio", "processor_ratio", "peak", "torch_us", "own_us")) > 0
            assert row["own"] == (row["auto"] in ("cpu", "held", "rows"))
            assert crossover.overhead(cell, rounds=1)["torch_us"] > 0


def test_a_cell_is_marked_where_auto_chooses_worse() -> None:
    import crossover

    def mark(own: bool, ratio: float, peak: float = 1.0) -> str:
        found: str = crossover.mark({"own": own, "ratio": ratio, "peak": peak})
        return found

    assert mark(True, 1.1) == mark(True, 0.95, 0.8) == mark(False, 1.09, 0.5) == mark(False, 0.3) == ""
    assert mark(True, 1.09) == mark(True, 0.94, 0.5) == mark(True, 1.0, 0.81) == "SLOWER"
    assert mark(False, 1.1) == "MISSED"
