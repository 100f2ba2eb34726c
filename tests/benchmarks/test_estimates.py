"""benchmarks/estimates.py: every rule has a pair, and what is promised is judged by what came."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests import report_fixtures as fixtures

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
    assert {pair.rule for pair in pairs} == set(RULES)
    assert len({pair.name for pair in pairs}) == len(pairs)
    lasting = [getattr(pair, "lasting", False) for pair in pairs]
    assert lasting == sorted(lasting)  # what changes the process for good comes after all others


def _measured(estimates: Any, bad: int, good: int, finding: Finding | None, worth: int = 1) -> Any:
    run = fixtures.gpt(2)
    runs = [
        [replace(run, step=replace(run.step, unprofiled_wall_ns=each * MS))] for each in (bad, good)
    ]  # fmt: skip
    return estimates.Measured("a pair", "a-rule", finding, *runs, worth=worth)


def _finding(low: int | None, likely: int | None, high: int | None) -> Finding:
    low, likely, high = (None if each is None else each * MS for each in (low, likely, high))
    return Finding(
        "a-rule", "info", (), None, "m", "e",
        predicted_saving_ns=likely, predicted_low_ns=low, predicted_high_ns=high,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("promised", "bad", "good", "holds", "too_much"),
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
    estimates: Any, promised: Any, bad: int, good: int, holds: bool | None, too_much: bool
) -> None:
    pair = _measured(estimates, bad, good, None if promised is None else _finding(*promised))
    assert (pair.holds, pair.is_too_much) == (holds, too_much)


def test_a_larger_batch_is_the_work_of_several(estimates: Any) -> None:
    assert _measured(estimates, 100, 160, None, worth=8).saved_ns == 80 * MS


def test_rows_say_what_was_promised_and_what_came(estimates: Any) -> None:
    rows = estimates.rows_of(_measured(estimates, 100, 80, _finding(10, 20, 30)))
    assert [(row.name.rpartition(": ")[2], row.value) for row in rows] == [
        ("measured", 20.0),
        ("at least", 10.0),
        ("promised", 20.0),
        ("at most", 30.0),
    ]
