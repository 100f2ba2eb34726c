"""What counts as noise: the quantiles, the limits, and the repeat that is not like the others."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from gradscope.compare.noise import FALSE_ALARMS, Error, Measured, limit_ns, odd_one, t_quantile
from tests.diff_fixtures import MS


@pytest.mark.parametrize(
    ("alpha", "freedom", "expected"),
    [  # from printed tables of Student's t, two-sided
        (0.05, 1, 12.706),
        (0.05, 2, 4.303),
        (0.05, 3, 3.182),
        (0.05, 4, 2.776),
        (0.05, 8, 2.306),
        (0.05, 30, 2.042),
        (0.01, 1, 63.657),
        (0.01, 5, 4.032),
        (0.01, 8, 3.355),
        (0.001, 7, 5.408),
        (0.001, 120, 3.373),
    ],
)
def test_quantiles_of_students_t(alpha: float, freedom: int, expected: float) -> None:
    assert round(t_quantile(alpha, freedom), 3) == expected


def test_quantiles_where_the_distribution_has_a_closed_form() -> None:
    for alpha in (0.05, 1e-3, 1e-6):
        assert math.isclose(t_quantile(alpha, 1), 1 / math.tan(math.pi * alpha / 2), rel_tol=1e-6)
        inside = 1 - alpha
        assert math.isclose(t_quantile(alpha, 2), inside * math.sqrt(2 / (1 - inside**2)), rel_tol=1e-6)


def test_the_limit_is_welchs() -> None:
    # Standard error sqrt(1/5 + 1/5) = 0.632456 ms, 8 degrees of freedom, t = 2.306004.
    one, other = Measured(100 * MS, MS, 5), Measured(101 * MS, MS, 5)
    assert limit_ns(one, other, 0.0, 1) == 1_458_445
    assert limit_ns(other, one, 0.0, 1) == 1_458_445


def test_degrees_of_freedom_are_rounded_down() -> None:
    # Variances of the means 4/4 = 1 and 1/4: 1.25² / (1²/3 + 0.25²/3) = 4.41, so 4: t = 2.776445.
    one, other = Measured(0, 2 * MS, 4), Measured(0, MS, 4)
    assert limit_ns(one, other, 0.0, 1) == int(2.7764451051977925 * math.sqrt(1.25) * MS)


def test_only_one_of_the_runs_varies() -> None:
    # 5 steps of one run against a constant: 4 degrees of freedom, standard error 1/sqrt(5) ms.
    limit = limit_ns(Measured(0, MS, 5), Measured(0, 0.0, 5), 0.0, 1)
    assert limit == int(2.7764451051977925 / math.sqrt(5) * MS)


def test_many_rows_widen_the_limit() -> None:
    one = Measured(100 * MS, MS, 5)
    assert limit_ns(one, one, 0.0, 20) == int(t_quantile(FALSE_ALARMS / 20, 8) * math.sqrt(2 / 5) * MS)
    assert limit_ns(one, one, 0.0, 20) > limit_ns(one, one, 0.0, 1)  # type: ignore[operator]


def test_more_steps_narrow_the_limit_down_to_the_floor() -> None:
    limits = [limit_ns(Measured(100 * MS, MS, n), Measured(90 * MS, MS, n), 0.01, 1) for n in (2, 5, 20, 1000)]
    assert limits == sorted(limits, reverse=True)  # type: ignore[type-var]
    assert limits[-1] == MS  # one percent of the larger of the two


def test_one_step_says_nothing() -> None:
    assert limit_ns(Measured(1, 0.0, 1), Measured(1, 0.0, 5), 0.5, 1) is None
    assert limit_ns(Measured(1, 0.0, 5), Measured(1, 0.0, 1), 0.5, 1) is None


def test_nothing_varies() -> None:
    assert limit_ns(Measured(5, 0.0, 5), Measured(9, 0.0, 5), 0.0, 1) == 0
    assert Error.of(Measured(5, 0.0, 5)).limit_ns(1) == 0.0


def test_the_odd_one_of_repeats() -> None:
    def pairs(*changes: int) -> list[tuple[Measured, Measured]]:
        return [(Measured(10 * MS, MS / 10, 5), Measured(10 * MS + change, MS / 10, 5)) for change in changes]

    assert odd_one(pairs(0, 0, 5 * MS, 0), 0.0) == 2
    assert odd_one(pairs(5 * MS, 5 * MS, 5 * MS, 0), 0.0) == 3
    assert odd_one(pairs(5 * MS, 5 * MS + 50_000, 5 * MS - 50_000), 0.0) is None
    assert odd_one(pairs(0, 0, 5 * MS, 0), 0.5) is None  # half of 15 ms is the floor
    one_step = (Measured(1, 0.0, 1), Measured(9, 0.0, 1))
    assert odd_one([*pairs(0, 5 * MS), one_step], 0.0) is None


def test_one_table_of_twenty_has_a_false_alarm() -> None:
    """Tables of ten rows of which nothing changed, of normal noise: 5 % of 2000 are 100, with a deviation of 9.7."""
    rng = random.Random(20)
    rows = 10

    def measure() -> Measured:
        steps = [rng.gauss(100 * MS, 3 * MS) for _ in range(5)]
        return Measured(statistics.fmean(steps), statistics.stdev(steps), 5)

    alarms = 0
    for _ in range(2000):
        pairs = [(measure(), measure()) for _ in range(rows)]
        alarms += any(abs(b.mean - a.mean) > (limit_ns(a, b, 0.0, rows) or 0) for a, b in pairs)
    assert 50 < alarms <= 120
