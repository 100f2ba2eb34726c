"""The mathematics of a fit, on blocks made by hand: how a block grows, which blocks are the same, where the peak is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

from gradscope.fitting.align import BatchRun, align
from gradscope.fitting.judge import LIMIT, largest_that
from gradscope.fitting.predict import Curves, Forecast, Peak, Polynomial, through
from gradscope.tables import BlockTable, MemoryCategory

SAVED, TEMPORARY, PARAMETER = MemoryCategory.SAVED, MemoryCategory.TEMPORARY, MemoryCategory.PARAMETER


class Block(NamedTuple):
    """One block: what it is, and between which events of the step it is alive."""

    op: str
    bytes: int
    born: int
    died: int
    category: str = TEMPORARY
    layer: int = -1
    leaf: str = "aten::empty"


def run(batch_size: int, blocks: Sequence[Block], events: int, layers: tuple[str, ...] = ("", "a", "b")) -> BatchRun:
    table = BlockTable(
        events=events,
        bytes=np.array([block.bytes for block in blocks], np.int64),
        born=np.array([block.born for block in blocks], np.int64),
        died=np.array([block.died for block in blocks], np.int64),
        category=tuple(block.category for block in blocks),
        layer=np.array([block.layer for block in blocks], np.int64),
        line=np.full(len(blocks), -1, np.int64),
        op=tuple(block.op for block in blocks),
        leaf=tuple(block.leaf for block in blocks),
    )
    return BatchRun(batch_size, table, layers)


# --------------------------------------------------------------------------------------------------------------------
# How one block grows
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((7, 7, 7), Polynomial(Fraction(7), Fraction(0), Fraction(0))),
        ((20, 30, 40), Polynomial(Fraction(0), Fraction(10), Fraction(0))),
        ((24, 34, 44), Polynomial(Fraction(4), Fraction(10), Fraction(0))),
        ((16, 36, 64), Polynomial(Fraction(0), Fraction(0), Fraction(4))),  # b x b floats
        ((22, 45, 76), Polynomial(Fraction(0), Fraction(3), Fraction(4))),
        ((4, 12, 24), Polynomial(Fraction(0), Fraction(-2), Fraction(2))),  # pairs: b (b - 1) / 2
        ((40, 30, 20), Polynomial(Fraction(60), Fraction(-10), Fraction(0))),
        ((2, 8, 18), Polynomial(Fraction(2), Fraction(-4), Fraction(2))),  # 2 (b - 1)²: from the first sample on
    ],
)
def test_sizes_of_tensors_at_2_3_4(values: tuple[int, int, int], expected: Polynomial) -> None:
    assert through(list(zip((2, 3, 4), values, strict=True))) == expected


@pytest.mark.parametrize(
    "values",
    [
        (128, 128, 192),  # rounded up to 64
        (64, 128, 128),
        (1, 1000, 2),
        (516096, 765952, 1011712),  # pages of a library's workspace
        (12, 32, 60),  # 4 b² - 4: less than nothing for no sample
        (60, 55, 60),  # 100 - 30 b + 5 b²: shrinks at first
        (60, 50, 20),  # bends down
    ],
)
def test_what_is_no_size_of_a_tensor_follows_its_mean_growth(values: tuple[int, int, int]) -> None:
    found = through(list(zip((2, 3, 4), values, strict=True)))
    slope = Fraction(values[2] - values[0], 2)
    assert found == Polynomial(values[0] - 2 * slope, slope, Fraction(0), exact=False)


def test_an_allocators_rounding_is_no_square() -> None:
    rounded = [(size, -(-200 * size // 512) * 512) for size in (2, 3, 4)]
    assert rounded == [(2, 512), (3, 1024), (4, 1024)]
    assert through(rounded, slack=512) == Polynomial(Fraction(1024), Fraction(0), Fraction(0))
    large = [(size, -(-200_000 * size // 512) * 512) for size in (2, 3, 4)]
    found = through(large, slack=512)
    assert (found.quadratic, found.exact) == (0, True)
    assert abs(found.at(1000) - 200_000_000) < 1000 * 512


def test_a_line_and_a_constant_may_be_off_by_the_slack_and_no_more() -> None:
    assert through([(2, 0), (3, 112), (4, 200)], slack=12) == Polynomial(Fraction(-200), Fraction(100), Fraction(0))
    assert not through([(2, 0), (3, 113), (4, 200)], slack=12).exact
    assert through([(2, 100), (3, 106), (4, 112)], slack=12) == Polynomial(Fraction(112), Fraction(0), Fraction(0))
    assert through([(2, 100), (3, 107), (4, 113)], slack=12).linear == Fraction(13, 2)
    # Within the slack of a line through both ends, which are alike, but not of the last.
    assert through([(2, 112), (3, 118), (4, 100)], slack=12).linear == -6


def test_values_are_whole_and_never_negative() -> None:
    assert Polynomial(Fraction(60), Fraction(-10), Fraction(0)).at(100) == 0
    assert Polynomial(Fraction(0), Fraction(1, 3), Fraction(0)).at(5) == 2
    assert Polynomial(Fraction(0), Fraction(0), Fraction(4)).at(10**6) == 4 * 10**12


def test_two_points_make_a_line() -> None:
    assert through([(2, 10), (4, 30)]) == Polynomial(Fraction(-10), Fraction(10), Fraction(0))


def test_curves_of_many_blocks() -> None:
    curves = Curves((2, 3, 4), np.array([[20, 30, 40], [16, 36, 64], [20, 30, 40], [1, 1000, 2]], np.int64))
    assert curves.at(10).tolist() == [100, 400, 100, 5]
    assert curves.exact.tolist() == [True, True, True, False]
    assert Curves((2, 3, 4), np.zeros((0, 3), np.int64)).at(8).tolist() == []


# --------------------------------------------------------------------------------------------------------------------
# Which blocks are the same
# --------------------------------------------------------------------------------------------------------------------


def plain(size: int) -> list[Block]:
    """A weight of 100, an activation of 10 a sample, a temporary of size x size inside its life."""
    return [
        Block("", 100, -1, 4, PARAMETER, 0),
        Block("aten::mul", 10 * size, 0, 3, SAVED, 1),
        Block("aten::mm", size * size, 1, 2),
    ]


def test_equal_sequences_align() -> None:
    found = align([run(size, plain(size), 4) for size in (2, 3, 4)])
    assert found.batch_sizes == (2, 3, 4)
    assert found.rows.tolist() == [0, 1, 2]
    assert found.bytes.tolist() == [[100, 100, 100], [20, 30, 40], [4, 9, 16]]
    assert not found.remainder.any()


def test_blocks_from_before_the_step_come_in_any_order() -> None:
    one = [Block("", 5, -1, 2, PARAMETER, 0), Block("", 3, -1, 2, PARAMETER, 0), Block("", 3, -1, 2, PARAMETER, 1)]
    two = [one[2], one[1], one[0]]
    found = align([run(2, one, 2), run(3, two, 2), run(4, one, 2)])
    assert found.bytes.tolist() == [[5, 5, 5], [3, 3, 3], [3, 3, 3]]


def test_a_kind_of_which_one_run_has_more_is_not_matched_by_its_first_ones() -> None:
    """What is left over is a remainder in each run: nothing is lost, and nothing is taken for something else."""
    few = [Block("aten::mul", 10, 0, 4), Block("aten::mul", 20, 1, 4)]
    many = [Block("aten::mul", 1, 0, 4), *(Block("aten::mul", 10 * size, size, 4) for size in (1, 2, 3))]
    found = align([run(2, many, 5), run(3, few, 5), run(4, few, 5)])
    for index, blocks in enumerate((many, few, few)):
        alive = found.bytes[:, index].sum() + found.remainder[index].max()
        assert alive == sum(block.bytes for block in blocks)


def test_a_remainder_is_the_most_that_was_alive_at_its_moment() -> None:
    """Between two blocks that are shared, the larger run has two of its own one after the other: the larger counts."""
    shared = [Block("aten::mul", 10, 0, 9), Block("aten::exp", 10, 5, 9)]
    more = [Block("aten::mm", 70, 1, 2), Block("aten::mm", 30, 3, 4)]
    two = [Block("aten::mul", 10, 0, 5), Block("aten::exp", 10, 1, 5)]
    found = align([run(2, [shared[0], *more, shared[1]], 9), run(3, two, 5), run(4, two, 5)])
    assert found.remainder[0].tolist()[1] == 70
    assert found.remainder[0].max() == 70 and not found.remainder[1:].any()


def test_layers_are_known_by_path() -> None:
    there = [Block("x", 1, 0, 1, TEMPORARY, 1)]
    here = [Block("x", 7, 0, 1, TEMPORARY, 0)]
    found = align([run(2, here, 1, ("a", "b")), run(4, there, 1, ("", "a"))])
    assert found.bytes.tolist() == [[7, 1]]


def test_a_workspace_that_only_large_batches_need() -> None:
    """Three calls of one op with another one between them; at 4 the second call takes a block more."""

    def small(size: int) -> BatchRun:
        names = ("aten::mm", "aten::relu", "aten::mm", "aten::relu", "aten::mm")
        blocks = [Block(name, (k + 1) * size, 2 * k, 2 * k + 1) for k, name in enumerate(names)]
        return run(size, blocks, 10)

    large = [
        Block("aten::mm", 4, 0, 1),
        Block("aten::relu", 8, 2, 3),
        Block("aten::mm", 12, 4, 7),
        Block("aten::mm", 50, 5, 6),
        Block("aten::relu", 16, 8, 9),
        Block("aten::mm", 20, 10, 11),
    ]
    found = align([small(2), small(3), run(4, large, 12)])
    assert found.rows.tolist() == [0, 1, 4, 5]  # the second call has two blocks now: neither is sure to be the old one
    assert found.bytes.tolist() == [[2, 3, 4], [4, 6, 8], [8, 12, 16], [10, 15, 20]]
    # What the second call holds is a remainder, right after the death of the relu before it.
    assert found.remainder.max(axis=1).tolist() == [6, 9, 62]
    assert [np.flatnonzero(row).tolist() for row in found.remainder] == [[4], [4], [4]]


def test_a_loop_over_the_samples_is_a_trend() -> None:
    """One block for each sample, alive to the end: none of them has a partner, and all together grow evenly."""

    def loop(size: int) -> BatchRun:
        blocks = [Block("aten::add", 10, k, size + 1) for k in range(size)]
        return run(size, [*blocks, Block("aten::mm", 1, size, size + 1)], size + 2)

    forecast = Forecast([loop(size) for size in (2, 3, 4)])
    assert [forecast.peak(size).peak_bytes for size in (2, 3, 4, 8, 100)] == [21, 31, 41, 81, 1001]
    assert forecast.peak(8).unmatched_bytes == 80


# --------------------------------------------------------------------------------------------------------------------
# Where the peak is
# --------------------------------------------------------------------------------------------------------------------


def test_the_parts_add_up_to_the_peak() -> None:
    forecast = Forecast([run(size, plain(size), 4) for size in (2, 3, 4)])
    assert forecast.peak(3) == Peak(3, 139, 30, 100, 9, 0)
    assert forecast.peak(100) == Peak(100, 100 + 1000 + 10_000, 1000, 100, 10_000, 0)


def test_the_moment_of_the_peak_moves() -> None:
    """An optimizer's temporary of 500 after backward rules at small batches, the activations at large ones."""

    def step(size: int) -> BatchRun:
        return run(
            size,
            [
                Block("", 100, -1, 4, PARAMETER),
                Block("aten::mul", 10 * size, 0, 1, SAVED),
                Block("Adam", 500, 2, 3),
            ],
            4,
        )

    forecast = Forecast([step(size) for size in (2, 3, 4)])
    assert forecast.peak(4) == Peak(4, 600, 0, 100, 500, 0)
    assert forecast.peak(49).peak_bytes == 600
    assert forecast.peak(51) == Peak(51, 610, 510, 100, 0, 0)


def test_a_correction_lives_with_the_saved_activations() -> None:
    def step(size: int) -> BatchRun:
        return run(size, [Block("aten::mul", 10 * size, 0, 2, SAVED), Block("Adam", 95, 3, 4)], 5)

    forecast = Forecast([step(size) for size in (2, 3, 4)])
    assert forecast.peak(8) == Peak(8, 95, 0, 0, 95, 0)
    assert forecast.peak(8, more_saved=40) == Peak(8, 120, 120, 0, 0, 0)
    assert forecast.peak(20, more_saved=-150) == Peak(20, 95, 0, 0, 95, 0)


def test_a_correction_where_nothing_was_saved() -> None:
    forecast = Forecast([run(size, [Block("aten::mul", 10 * size, 0, 2)], 3) for size in (2, 3, 4)])
    assert forecast.peak(8, more_saved=40) == Peak(8, 120, 40, 0, 80, 0)
    assert forecast.peak(8, more_saved=-40) == Peak(8, 80, 0, 0, 80, 0)


def test_uneven_blocks_are_told() -> None:
    sizes = {2: 516096, 3: 765952, 4: 1011712}
    forecast = Forecast([run(size, [Block("aten::lstm", value, 0, 1)], 2) for size, value in sizes.items()])
    peak = forecast.peak(64)
    assert peak.peak_bytes == 1011712 + 60 * (1011712 - 516096) // 2
    assert peak.unmatched_bytes == peak.peak_bytes


def test_a_remainder_neither_falls_nor_outgrows_the_batch() -> None:
    """A temporary that only some of the sizes have: 30 bytes at 2, none at 3 and 4; and none, none, 100."""

    def step(size: int, extra: int) -> BatchRun:
        blocks = [Block("aten::mul", size, 0, 1)]
        if extra:
            blocks.append(Block("aten::sum", extra, 2, 3))
        return run(size, blocks, 4)

    falling = Forecast([step(2, 30), step(3, 0), step(4, 0)])
    assert falling.peak(64).peak_bytes == 64
    rising = Forecast([step(2, 0), step(3, 0), step(4, 100)])
    # The trend would be 100 a sample from 4 on: 6100; in proportion to the batch it is 1600.
    assert rising.peak(64).unmatched_bytes == 1600
    assert rising.peak(3).unmatched_bytes == 0


def test_growth_by_layer() -> None:
    def step(size: int) -> BatchRun:
        return run(
            size,
            [
                Block("aten::mul", 10 * size, 0, 6, SAVED, 1),
                Block("aten::exp", 3 * size, 1, 5, SAVED, 1),
                Block("aten::mm", size * size, 2, 4, SAVED, 2),
                Block("aten::nll", 4, 3, 4, SAVED),
                Block("aten::sum", 8 * size, 3, 4, SAVED),
                Block("aten::tmp", 99 * size, 3, 4, TEMPORARY, 2),
            ],
            7,
        )

    forecast = Forecast([step(size) for size in (2, 3, 4)])
    assert forecast.saved_growth(10) == {"a": 13, "b": 100 - 81, None: 8}


# --------------------------------------------------------------------------------------------------------------------
# The largest
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 63, 64, 65, 1000, 524_289, LIMIT - 1, LIMIT])
@pytest.mark.parametrize("start", [1, 7, 64])
def test_the_largest_that_fits(answer: int, start: int) -> None:
    asked = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= answer

    assert largest_that(fits, start) == answer
    assert len(asked) <= 42


def test_the_search_ends() -> None:
    assert largest_that(lambda size: True) == LIMIT
