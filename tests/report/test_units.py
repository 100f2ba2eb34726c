"""gradscope.units: numbers to text."""

from __future__ import annotations

import random

import pytest

from gradscope import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (540, "540 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_949, "1.00 ms"),
        (12_300_000, "12.3 ms"),
        (544_000_000, "544 ms"),
        (61_000_000_000, "61.0 s"),
        (-1_500_000, "-1.50 ms"),
    ],
)
def test_ns(value: int | None, text: str) -> None:
    assert units.ns(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (512, "512 B"), (33_600_000, "33.6 MB"), (1_240_000_000, "1.24 GB")]
)
def test_size(value: int | None, text: str) -> None:
    assert units.size(value) == text


def test_flop_count_calls_ratio() -> None:
    assert units.flop(1_300_000_000_000) == "1.30 TFLOP"
    assert [units.count(n) for n in (0, 12, 4_810, 12_000, 124_400_000)] == ["0", "12", "4810", "12.0 k", "124 M"]
    assert [units.calls(n) for n in (0, 1.0, 12, 0.5, 0.04, 350.2, None)] == ["0", "1", "12", "0.5", "0.04", "350", "-"]
    assert [units.ratio(x) for x in (2.1, 16, 350, None)] == ["×2.10", "×16.0", "×350", "-"]
    assert units.ratio(1e7) == "×1e+07"


def test_percent_tells_little_from_nothing() -> None:
    assert [units.percent(x) for x in (0, 0.0003, 0.123, 1, None)] == ["0.0 %", "<0.1 %", "12.3 %", "100.0 %", "-"]
    assert units.threshold(1.0) == "1 %"
    assert units.threshold(0.5) == "0.5 %"


def test_rate_is_flop_per_ns() -> None:
    assert units.rate_gflops(2_000_000, 1_000_000) == "2.00"
    assert units.rate_gflops(None, 1_000) == "-"
    assert units.rate_gflops(1_000, 0) == "-"
    assert units.rate_gflops(0, 1_000) == "-"  # nothing that torch counts


@pytest.mark.parametrize("decimals", [0, 1, 2])
def test_percents_of_parts_add_up_to_a_hundred(decimals: int) -> None:
    rng = random.Random(3)
    for _ in range(200):
        parts = [rng.choice((0, rng.randrange(50), rng.randrange(10**9))) for _ in range(rng.randrange(1, 9))]
        if not sum(parts):
            continue
        texts = units.percents_of(parts, sum(parts), decimals)
        hundredths = sum(round(float(text.removesuffix(" %")) * 10**decimals) for text in texts)
        assert hundredths == 100 * 10**decimals
        for part, text in zip(parts, texts, strict=True):
            assert abs(float(text.removesuffix(" %")) - 100 * part / sum(parts)) < 10.0**-decimals


def test_percents_of_nothing() -> None:
    assert units.percents_of([0, 0], 0) == ["0.0 %", "0.0 %"]


def test_a_scale_keeps_one_unit_for_a_column() -> None:
    scale = units.time_scale(240_210_000)
    assert scale.unit == "ms"
    assert [scale.text(v) for v in (240_210_000, 98_000, 1_000, 0, None)] == ["240.2", "0.1", "<0.1", "0", "-"]
    assert units.time_scale(12_345).text(12_345) == "12.35"
    assert units.time_scale(1_533_100_000).text(1_533_100_000) == "1533.1"  # ms: 2 ms are not yet 0.00
    assert units.time_scale(800).text(7) == "7"
