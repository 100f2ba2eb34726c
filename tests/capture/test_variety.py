"""How far steps did what others did, by their calls: counts of nodes, no clock."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.capture.variety import StepBounds, Variety
from gradscope.tables import OF_TORCHS_LAYER, SpanTable

Call = tuple[int, int, int, int]  # layer, instruction, first number, and the one behind the last


def step(*calls: Call, nodes: int, base: int = 0) -> tuple[SpanTable, list[StepBounds]]:
    label, caller, low, high = np.array(calls, np.int64).reshape(-1, 4).T
    return SpanTable(label, low + base, high + base, caller=caller), [StepBounds(0, base, len(calls), base + nodes)]


MODEL = (0, 10, 0, 8)
FIRST, SECOND = (1, 20, 0, 3), (2, 20, 4, 7)
WHOLE = step(MODEL, FIRST, SECOND, nodes=10)


def unseen(*args: Call, nodes: int, base: int = 0) -> float:
    variety = Variety()
    variety.add(*WHOLE)
    return variety.unseen(*step(*args, nodes=nodes, base=base))


def test_the_same_calls_at_other_numbers_are_the_same() -> None:
    assert unseen(MODEL, FIRST, SECOND, nodes=10, base=4_000) == 0


@pytest.mark.parametrize(
    ("calls", "nodes", "expected"),
    [
        ((MODEL, FIRST, (3, 20, 4, 7)), 10, 5 / 10),  # another layer: its three, and the two of what called it
        ((MODEL, FIRST, (2, 21, 4, 7)), 10, 5 / 10),  # from another instruction, which may be the line of its own
        ((MODEL, FIRST, (2, 20, 4, 8)), 10, 4 / 10),  # the layer drew one node more
        ((MODEL, FIRST, SECOND), 11, 3 / 11),  # the step did, outside of all layers
        (
            ((0, 10, 0, 4), FIRST),
            6,
            0.0,
        ),  # the second was dropped: between the two others there is what was beside each
        (((0, 10, 0, 5), FIRST), 7, 2 / 7),  # and here there is more
        ((), 4, 1.0),
    ],
)
def test_nodes_of_calls_that_did_something_else(calls: tuple[Call, ...], nodes: int, expected: float) -> None:
    assert unseen(*calls, nodes=nodes) == pytest.approx(expected)


def test_what_calls_did_counts_whatever_step_they_were_in() -> None:
    variety = Variety()
    variety.add(*WHOLE)
    variety.add(*step((0, 10, 0, 4), (3, 20, 0, 3), nodes=6))
    assert variety.unseen(*step(MODEL, (1, 20, 0, 3), (3, 20, 4, 7), nodes=10)) == pytest.approx(1 / 10)


def test_the_same_calls_that_drew_more_are_another_step() -> None:
    variety = Variety()
    variety.add(*WHOLE)
    more = step(MODEL, FIRST, (2, 20, 4, 8), nodes=10)
    variety.add(*more)
    assert variety.unseen(*more) == variety.unseen(*WHOLE) == 0


def test_steps_without_a_graph_lack_nothing() -> None:
    variety = Variety()
    assert variety.unseen(*step((0, 1, 0, 0), nodes=0)) == 0
    assert variety.unseen(*WHOLE) == 1


def test_what_a_container_calls_is_called_by_what_called_the_container() -> None:
    """It stands on that line: as many nodes of the same layers, and the container draws none itself."""
    inside = (2, OF_TORCHS_LAYER + 3, 0, 3)
    variety = Variety()
    variety.add(*step(MODEL, (1, 20, 0, 3), inside, nodes=8))
    assert variety.unseen(*step(MODEL, (1, 20, 0, 3), inside, nodes=8)) == 0
    assert variety.unseen(*step(MODEL, (1, 21, 0, 3), inside, nodes=8)) == pytest.approx((3 + 5) / 8)


def test_calls_of_other_threads_count_numbers_of_their_own() -> None:
    """They are left out, wherever their thread's numbers stand."""
    elsewhere = [(4, 20, -90, -80), (4, 20, 500, 600)]
    assert unseen(MODEL, FIRST, SECOND, *elsewhere, nodes=10) == 0
    assert 0 <= unseen(MODEL, FIRST, (3, 20, 4, 7), *elsewhere, nodes=10) <= 1
