"""Values that a graph returns and nobody uses: told by the gradients that a few runs of backward are given."""

from __future__ import annotations

import torch

from gradscope.compat import GraphWatch
from gradscope.tables import GraphNote

ONES, ZEROS = torch.ones(2), torch.zeros(2)


def watch() -> GraphWatch:
    made = GraphWatch()
    made.graphs.append(GraphNote((), {}, inputs=("primals_1", "tangents_1", "tangents_2")))
    return made


def test_a_value_that_no_pass_uses() -> None:
    found = watch()
    for _ in range(9):
        assert found.run(0, [ZEROS, ZEROS, ONES]) == 0
    assert found.runs[0].zeros == ("tangents_1",)


def test_values_that_passes_use_in_turns_are_used() -> None:
    found = watch()
    found.run(0, [ZEROS, ZEROS, ONES])
    found.run(0, [ZEROS, ONES, ZEROS])
    assert found.runs[0].zeros == ()
    found.run(0, [ZEROS, ZEROS, ZEROS])
    assert found.runs[0].zeros == ()


def test_only_a_few_runs_are_looked_at() -> None:
    """Reading a gradient waits for the device."""
    found = watch()
    for _ in range(5):
        found.run(0, [ZEROS, ZEROS, ONES])
    found.run(0, [ZEROS, ONES, ONES])
    assert found.runs[0].zeros == ("tangents_1",)


def test_other_sizes_are_another_run() -> None:
    found = watch()
    assert found.run(0, [ZEROS, ZEROS, ONES, 3]) == 0
    assert found.run(0, [ZEROS, ONES, ZEROS, 4]) == 1
    assert [ran.zeros for ran in found.runs] == [("tangents_1",), ("tangents_2",)]
