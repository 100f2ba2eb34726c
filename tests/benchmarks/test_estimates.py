"""benchmarks/estimates.py: every rule has a pair, and what is promised is judged by what came."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding

MS = 1_000_000


@pytest.fixture
def estimates(request: pytest.FixtureRequest) -> Iterator[Any]:
    folder, before, known = str(request.config.rootpath / "benchmarks"), list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    yield importlib.import_module("estimates")
    sys.path[:] = before
    for name in ("estimates", "estimate_pairs", "_common"):
        if name not in known:
            sys.modules.pop(name, None)


def test_every_rule_has_a_pair(estimates: Any) -> None:
    pairs = estimates.every_pair()
    # Which need several ranks, or promise nothing.
    assert set(estimates.WITHOUT) == {
        "exposed-communication",
        "late-bucket",
        "compile-failed",
        "graph-break",
        "graph-recompute",
        "not-compiled",
        "recompiles",
    }
    assert {pair.rule for pair in pairs} == set(RULES) - set(estimates.WITHOUT)
    assert len({pair.name for pair in pairs}) == len(pairs)
    lasting = [getattr(pair, "lasting", False) for pair in pairs]
    assert lasting == sorted(lasting)  # what changes the process for good comes after all others


def _measured(estimates: Any, bad: int, cured: int, finding: Finding | None, scatter: int = 0) -> Any:
    """Steps of so many ms; the cured ones scatter evenly around theirs."""
    cured_ns = [(cured + scatter * (turn - 10) // 10) * MS for turn in range(21)]
    return estimates.Measured("a pair", "a-rule", finding, [bad * MS] * 21, cured_ns)


def _finding(low: int | None, likely: int | None, high: int | None) -> Finding:
    low, likely, high = (None if each is None else each * MS for each in (low, likely, high))
    return Finding(
        "a-rule", "info", (), None, "m", "e",
        predicted_saving_ns=likely, predicted_low_ns=low, predicted_high_ns=high,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("promised", "bad", "cured", "holds", "too_much"),
    [
        ((10, 20, 30), 100, 80, True, False),
        ((10, 20, 30), 100, 41, True, False),
        ((10, 20, 30), 100, 39, False, False),  # more came than twice the most
        ((10, 20, 30), 100, 97, False, True),
        ((0, 20, 30), 100, 120, True, True),  # it became slower: nothing came
        ((10, 20, 30), 100, 120, False, True),
        ((None, None, 30), 100, 100, True, False),  # the most that there is to gain
        ((None, None, 30), 100, 30, False, False),
        (None, 100, 50, None, False),
    ],
)
def test_a_promise_is_judged_by_what_came(
    estimates: Any, promised: Any, bad: int, cured: int, holds: bool | None, too_much: bool
) -> None:
    pair = _measured(estimates, bad, cured, None if promised is None else _finding(*promised))
    assert (pair.holds, pair.is_too_much) == (holds, too_much)


@pytest.mark.parametrize(
    ("scatter", "holds", "too_much", "untold"), [(0, False, True, False), (100, True, False, True)]
)
def test_what_scatters_more_than_it_saves_is_not_told(
    estimates: Any, scatter: int, holds: bool, too_much: bool, untold: bool
) -> None:
    """20 ms promised and 3 came, on the average: of a quiet machine too much, of a busy one nothing can be said."""
    pair = _measured(estimates, 1000, 997, _finding(10, 20, 30), scatter)
    assert (pair.holds, pair.is_too_much, pair.is_untold) == (holds, too_much, untold)


def test_a_promise_is_a_share_of_the_step_that_was_profiled(estimates: Any) -> None:
    """Of a step of 200 ms in the report, 40 promised are 20 of one that takes 100 in the turns."""
    pair = replace(_measured(estimates, 100, 80, _finding(20, 40, 60)), profiled_ns=200 * MS)
    assert pair.promised_ns == {"at least": 10 * MS, "promised": 20 * MS, "at most": 30 * MS}
    assert [row.value for row in estimates.rows_of(pair)] == [20.0, 10.0, 20.0, 30.0]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9, 25])
def test_the_interval_holds_the_median_with_its_confidence(estimates: Any, count: int) -> None:
    """By counting: how many of so many coins show heads is outside of both ends in at most 5 %, or it is the whole."""
    outside = estimates._outside(count)
    sure = sum(math.comb(count, heads) for heads in range(outside + 1, count - outside)) / 2**count
    assert sure >= 0.95 or outside == 0
    narrower = sum(math.comb(count, heads) for heads in range(outside + 2, count - outside - 1)) / 2**count
    assert narrower < 0.95


def test_a_larger_batch_is_the_work_of_several(estimates: Any) -> None:
    def made(seconds: float) -> dict[str, Any]:
        return {"model": _Sleeping(seconds), "batch": torch.ones(2)}

    pair = estimates_pair(estimates, lambda: made(0.1), lambda: made(0.2), worth=4)
    measured = estimates.measure(pair, 2)
    least, _, most = measured.saved_ns
    # 100 of the one against a quarter of 200: on a busy machine sleeps may take some 20 longer.
    assert 25 * MS < least <= most < 75 * MS


class _Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(2)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return (self.weight * x).sum()


def estimates_pair(estimates: Any, bad: Any, good: Any, worth: int) -> Any:
    return importlib.import_module("estimate_pairs").Pair("a pair", "leak", bad, good, worth=worth)


def test_cures_compute_what_the_bad_ones_do(estimates: Any) -> None:
    """Of the same weights and the same batch, but for dropout; a cure of another model would be a twin again."""
    pairs = {pair.name: pair for pair in estimates.every_pair()}
    assert set(estimates.CURES) <= set(pairs)
    for name, make in estimates.CURES.items():
        torch.manual_seed(0)
        bad, cured = pairs[name].bad(), make()
        if "step" in bad or "dropout" in name:
            continue
        assert cured["batch"].shape == bad["batch"].shape, name
        cured["model"].load_state_dict(bad["model"].state_dict())
        found, expected = (each["model"](bad["batch"]) for each in (cured, bad))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}")


def test_a_setting_of_the_process_is_not_left_on_for_the_cure(estimates: Any) -> None:
    """Anomaly mode is on while the bad one's batches are drawn, and must be off while the cured one runs."""
    (pair,) = (pair for pair in estimates.every_pair() if pair.rule == "anomaly-mode")
    seen: dict[str, list[bool]] = {"bad": [], "good": []}

    def noting(which: str, make: Any) -> Any:
        made = make()
        made["model"].register_forward_hook(lambda *_: seen[which].append(torch.is_anomaly_enabled()))
        return made

    watched = replace(pair, bad=lambda: noting("bad", pair.bad), good=lambda: noting("good", pair.good))
    estimates.measure(watched, 2)
    assert seen["bad"] and all(seen["bad"]) and seen["good"] and not any(seen["good"])
    assert not torch.is_anomaly_enabled()


def test_rows_say_what_was_promised_and_what_came(estimates: Any) -> None:
    rows = estimates.rows_of(_measured(estimates, 100, 80, _finding(10, 20, 30)))
    assert [(row.name.rpartition(": ")[2], row.value) for row in rows] == [
        ("came", 20.0),
        ("at least", 10.0),
        ("promised", 20.0),
        ("at most", 30.0),
    ]
