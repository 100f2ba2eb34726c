"""Benchmarks that lean on gradscope's inside still run, and look at the state that they say they do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
FAR = 1.5  # between this and x1.1 a rule may leave to torch what another kind of CPU has slower


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


def test_auto_takes_what_the_published_grid_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours where it pays by the newest record of each CPU and capability; not torch's where ours is far faster in all.

    At a rule's limit one run says x1.12 and the next x1.08: there the upper quarter of the rounds decides.
    """
    from crossover_cases import CELLS

    records = [json.loads(line) for line in (RESULTS / "crossover.jsonl").read_text().splitlines()]
    monkeypatch.setattr(torch, "randn", torch.empty)  # the content of so much would take most of the time
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cells = [record for record in records if record["threads"] == threads]
            for cell in CELLS:
                own = cell.explain().backend in cell.own
                all_rows = _rows_of(cell, cells)
                newest = {(record["device_name"], record["capability"]): row for record, row in all_rows}
                rows = newest.values()
                assert not own or (rows and all(_pays_within_scatter(row) for row in rows)), (
                    threads,
                    cell.recipe,
                    cell.sizes,
                )
                assert own or min(row["ratio"] for _, row in all_rows) < FAR, (threads, cell.recipe, cell.sizes)
    finally:
        torch.set_num_threads(before)


def _pays_within_scatter(row: dict[str, Any]) -> bool:
    import crossover

    return crossover.pays(row) or (row["ratio"] >= crossover.EQUAL and row["high"] >= crossover.FASTER)


def _rows_of(cell: Any, records: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each with its record: one may have some of the cells alone."""
    what = (cell.recipe, cell.sizes)
    return [(record, row) for record in records for row in record["cells"] if (row["recipe"], row["sizes"]) == what]


def test_a_cell_is_marked_where_auto_chooses_worse() -> None:
    import crossover

    def mark(own: bool, ratio: float, peak: float = 1.0) -> str:
        found: str = crossover.mark({"own": own, "ratio": ratio, "peak": peak})
        return found

    assert mark(True, 1.1) == mark(True, 0.95, 0.8) == mark(False, 1.09, 0.5) == mark(False, 0.3) == ""
    assert mark(True, 1.09) == mark(True, 0.94, 0.5) == mark(True, 1.0, 0.81) == "SLOWER"
    assert mark(False, 1.1) == "MISSED"
