"""Truth: what is allocated at known moments, by category, and which layer runs when."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.attribute.memory.blocks import NEVER, Blocks
from gradscope.attribute.memory.classify import Classified
from gradscope.attribute.memory.step import Running
from gradscope.attribute.memory.timeline import Piece, _tiled, categories_of, flatten, join, kept_entries
from gradscope.errors import RunFileError
from gradscope.report.runfile import from_json, from_record, to_json
from gradscope.tables import ConservationError, MemoryCategory, MemoryInfo, PhaseSpan, RunData

from .measuring import F32, in_a_loop, measured, memory_of, moment
from .test_peak import INPUT, LOSS, OUTPUT, STEM, TAIL, WIDE, X, network

FEATURES, OUTPUTS, BATCH = 16, 4, 8
LEAST = np.iinfo(np.int64).min


def phase(memory: MemoryInfo, name: str) -> PhaseSpan:
    """The first stretch of a phase."""
    return next(span for span in memory.phases if span.phase == name)


# --------------------------------------------------------------------------------------------------------------------
# Categories at known moments
# --------------------------------------------------------------------------------------------------------------------


def test_a_linear_layer_step_by_step() -> None:
    """The loss is a sum: it keeps nothing. What Linear keeps are the batch and its weight, which are there anyway."""
    model = nn.Linear(FEATURES, OUTPUTS, bias=False)
    weight, output, batch = FEATURES * OUTPUTS * F32, BATCH * OUTPUTS * F32, BATCH * FEATURES * F32
    memory = memory_of(measured(model, torch.ones(BATCH, FEATURES)))
    there = {"parameters": weight, "inputs": batch}
    assert moment(memory, 0) == {**there, "gradients": weight}  # the old ones, until the step zeroes them
    assert moment(memory, phase(memory, "forward").start_ns) == there
    backward = phase(memory, "backward")
    # The output and the loss are held by the loop, and with the loss the 1 that backward starts from.
    before = {**there, "other activations": output + LOSS}
    assert moment(memory, backward.start_ns) == before
    assert moment(memory, backward.end_ns) == {**before, "gradients": weight}


def test_a_network_keeps_in_forward_and_makes_gradients_in_backward() -> None:
    memory = memory_of(measured(network(), X))
    there = {"parameters": STEM + TAIL, "inputs": INPUT}
    backward = phase(memory, "backward")
    held = {**there, "other activations": OUTPUT + LOSS}
    assert moment(memory, phase(memory, "forward").start_ns) == there
    assert moment(memory, backward.start_ns) == {**held, "saved activations": WIDE}
    assert moment(memory, backward.end_ns) == {**held, "gradients": STEM + TAIL}
    # ReLU's node: the gradients of its output and its input, what it kept, and the tail's gradients.
    assert moment(memory, memory.peak_ns) == {
        **held,
        "saved activations": WIDE,
        "gradients": TAIL,
        "activation gradients": 2 * WIDE,
    }


def test_categories_are_in_their_order_and_none_is_empty() -> None:
    memory = memory_of(measured(network(), X, optimizer=None))
    assert memory.categories is not None
    named = [course.category for course in memory.categories]
    assert named == [category.value for category in MemoryCategory if category.value in named]
    assert "optimizer state" not in named and "buffers" not in named


def by_hand() -> tuple[Running, Blocks, Classified]:
    """Four blocks over six events: a parameter of before, and what is saved, released by its node, and never freed."""
    blocks = Blocks(
        events=cast(Any, None),
        bytes=np.array([100, 7, 20, 3]),
        born=np.array([-1, 0, 1, 4]),
        died=np.array([NEVER, 2, 5, NEVER]),
        seen=[[], [], [], []],
        of_saved=[],
    )
    kinds = (MemoryCategory.PARAMETER, MemoryCategory.TEMPORARY, MemoryCategory.SAVED, MemoryCategory.GRADIENT)
    nothing = np.zeros(4, np.int64)
    classified = Classified(
        block=np.arange(4),
        category=list(kinds),
        layer=nothing,
        line=nothing,
        op=[""] * 4,
        leaf=[""] * 4,
        row=nothing,
        saved_until=np.array([LEAST, LEAST, 35, LEAST]),
    )
    times = np.array([0, 10, 20, 30, 40, 50, 60])
    return Running(0, times, np.array([100, 107, 127, 120, 120, 123, 103])), blocks, classified


def test_what_outlives_its_node_is_no_longer_saved() -> None:
    running, blocks, classified = by_hand()
    found = {course.category: course.bytes for course in categories_of(running, blocks, classified, np.arange(7))}
    assert found == {
        "parameters": (100,) * 7,
        "gradients": (0, 0, 0, 0, 0, 3, 3),
        "saved activations": (0, 0, 20, 20, 0, 0, 0),  # the last node that kept it ended at 35
        "other activations": (0, 0, 0, 0, 20, 20, 0),
        "temporaries": (0, 7, 7, 0, 0, 0, 0),
    }
    thinned = categories_of(running, blocks, classified, np.array([0, 2, 6]))
    assert {course.category: course.bytes for course in thinned} == {
        "parameters": (100, 100, 100),
        "gradients": (0, 0, 3),
        "saved activations": (0, 20, 0),
        "temporaries": (0, 7, 0),
    }


def test_what_a_recompute_keeps_is_saved_until_it_dies() -> None:
    """No note tells which node kept it: it was made after the graph had been looked at."""
    running, blocks, classified = by_hand()
    unknown = dataclasses.replace(classified, saved_until=np.full(4, LEAST))
    found = {course.category: course.bytes for course in categories_of(running, blocks, unknown, np.arange(7))}
    assert found["saved activations"] == (0, 0, 20, 20, 20, 20, 0)
    assert "other activations" not in found


@pytest.mark.parametrize(
    ("spans", "tiles"),
    [
        ([], [("other", 0, 90)]),
        ([(110, 190, "forward")], [("other", 0, 10), ("forward", 10, 90)]),  # no empty stretch at the end
        ([(100, 150, "forward"), (110, 120, "forward")], [("forward", 0, 50), ("other", 50, 90)]),  # one in the other
        ([(100, 110, "forward"), (130, 140, "forward")], [("forward", 0, 40), ("other", 40, 90)]),
        (
            [(100, 150, "forward"), (120, 170, "backward")],
            [("forward", 0, 50), ("backward", 50, 70), ("other", 70, 90)],
        ),
        ([(100, 150, "forward"), (120, 130, "backward")], [("forward", 0, 50), ("other", 50, 90)]),
        (
            [(80, 120, "optimizer"), (180, 230, "forward")],
            [("optimizer", 0, 20), ("other", 20, 80), ("forward", 80, 90)],
        ),
        ([(50, 95, "backward"), (190, 200, "forward")], [("other", 0, 90)]),  # of the steps around
    ],
)
def test_phases_fill_the_step_and_overlap_nowhere(
    spans: list[tuple[int, int, str]], tiles: list[tuple[str, int, int]]
) -> None:
    found = _tiled(sorted(spans), 100, 190)
    assert [(tile.phase, tile.start_ns, tile.end_ns) for tile in found] == tiles


def test_a_phase_is_shown_from_what_was_there_when_it_began() -> None:
    """The last event of the phase before it, however small the phase is."""
    time = np.arange(0, 30_000, 3)
    total = np.full(10_000, 500) + (time % 2)
    total[5_000], total[5_001] = 100, 900
    trace = cast(Any, SimpleNamespace(start_ns=0, end_ns=30_000))
    phases = (PhaseSpan("other", 0, 15_002), PhaseSpan("optimizer", 15_002, 15_005), PhaseSpan("other", 15_005, 30_000))
    total[4_990] = total[5_005] = 0  # lower still, in the phase before and in the same stretch of time
    kept = set(kept_entries(trace, Running(0, time, total), phases).tolist())
    assert {5_000, 5_001} <= kept


def test_a_thinned_timeline_keeps_the_extremes_of_every_phase() -> None:
    time = np.arange(30_000)
    total = (time * 7_919) % 10_007 + 10
    total[12_345] = 99_999
    total[20_010], total[20_020] = 1, 50_000  # in a phase of 30 ns, less than a stretch of time
    trace = cast(Any, SimpleNamespace(start_ns=1_000, end_ns=31_000))
    phases = (PhaseSpan("forward", 0, 20_000), PhaseSpan("optimizer", 20_000, 20_030), PhaseSpan("other", 20_030, 9**9))
    kept = set(kept_entries(trace, Running(0, time + 1_000, total), phases).tolist())
    assert {0, 29_999, 12_345, 20_010, 20_020} <= kept
    assert len(kept) <= 410
    few = Running(0, time[:400] + 1_000, total[:400])
    assert kept_entries(trace, few, phases).tolist() == list(range(400))


# --------------------------------------------------------------------------------------------------------------------
# What RUN.json says of it
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> RunData:
    """A run of three layers."""
    return measured(network(), X)


def test_a_file_of_before_categories_and_spans_loads(run: RunData) -> None:
    record = json.loads(to_json(run))
    for key in ("categories", "spans", "spans_left_out"):
        del record["memory"][key]
    memory = memory_of(from_record(record, "old.json"))
    assert (memory.categories, memory.spans, memory.spans_left_out) == (None, None, None)
    assert memory.timeline == memory_of(run).timeline
    assert from_json(to_json(run)) == run


def test_categories_that_do_not_add_up_are_refused(run: RunData) -> None:
    record = json.loads(to_json(run))
    course = record["memory"]["categories"][0]
    course["bytes"][2] += 1
    size = record["memory"]["timeline"][2]["bytes"]
    with pytest.raises(RunFileError) as error:
        from_record(record, "run.json")
    assert str(error.value) == (
        f"run.json has numbers that do not add up: categories at point 2 of the timeline: {size + 1} != {size} bytes.\n"
        "It was changed after it was written; profile again."
    )
    course["bytes"].pop()
    points = len(record["memory"]["timeline"])
    with pytest.raises(RunFileError, match=f"points of parameters: {points - 1} != {points} points"):
        from_record(record, "run.json")


def test_categories_at_the_peak_are_those_of_the_live_set(run: RunData) -> None:
    memory = memory_of(run)
    other = [dataclasses.replace(row, category="temporaries") for row in memory.at_peak]
    with pytest.raises(ConservationError, match="categories at the peak"):
        dataclasses.replace(run, memory=dataclasses.replace(memory, at_peak=other))


# --------------------------------------------------------------------------------------------------------------------
# Which layer ran when
# --------------------------------------------------------------------------------------------------------------------


def in_turn(data: RunData) -> list[tuple[str, str]]:
    """Layers and phases in the order in which they ran, without the root between them."""
    spans = memory_of(data).spans
    assert spans is not None
    return [key for key, _ in groupby((span.layer, span.phase) for span in spans if span.layer)]


def test_layers_run_in_turn_and_backward_the_other_way(run: RunData) -> None:
    assert in_turn(run) == [
        ("0", "forward"),
        ("1", "forward"),
        ("2", "forward"),
        ("2", "backward"),
        ("1", "backward"),
        ("0", "backward"),
    ]
    memory = memory_of(run)
    assert memory.spans is not None
    for span in memory.spans:
        around = phase(memory, span.phase)
        assert around.start_ns <= span.start_ns and span.end_ns <= around.end_ns
    assert memory.spans_left_out == 0


def test_recompute_is_a_phase_of_its_own() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.first, x, use_reentrant=False)
            out: Tensor = self.last(hidden.relu())
            return out

    assert in_turn(measured(Recomputed(), X.clone().requires_grad_())) == [
        ("first", "forward"),
        ("last", "forward"),
        ("last", "backward"),
        ("first", "backward"),  # its node begins, and asks for what it was to keep
        ("first", "recompute"),
        ("first", "backward"),
    ]


def test_two_passes_in_one_step() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def step() -> None:
        for _ in range(2):
            model(X).sum().backward()

    once = [("0", "forward"), ("1", "forward"), ("1", "backward"), ("0", "backward")]
    assert in_turn(in_a_loop(model, step)) == once + once


def test_the_innermost_of_nested_intervals_counts() -> None:
    """A layer from 0 to 100 with one below it twice, which has one below it; then nothing; then another."""
    rows = [(0, 100, 1), (10, 40, 2), (20, 30, 3), (40, 60, 2), (100, 120, -1), (130, 140, 4)]
    assert list(flatten(iter(rows))) == [
        (0, 10, 1),
        (10, 20, 2),
        (20, 30, 3),
        (30, 40, 2),
        (40, 60, 2),
        (60, 100, 1),
        (100, 120, -1),
        (130, 140, 4),
    ]
    assert list(flatten(iter([]))) == []
    assert list(flatten(iter([(0, 10, 1), (0, 10, 2), (5, 5, 3)]))) == [(0, 5, 2), (5, 10, 2)]


def test_what_is_close_is_joined_and_nothing_overlaps() -> None:
    pieces = [
        Piece(0, 10, 1, "forward"),
        Piece(12, 20, 1, "forward"),  # 2 later: the same
        Piece(23, 30, 1, "forward"),  # 3 later: not
        Piece(30, 40, 2, "forward"),
        Piece(40, 50, 1, "forward"),  # another was between
        Piece(50, 60, 1, "backward"),  # another phase
        Piece(55, 70, 2, "backward"),  # another thread, which began later
        Piece(56, 58, 3, "backward"),
    ]
    assert join(list(reversed(pieces)), apart=2) == [
        Piece(0, 20, 1, "forward"),
        Piece(23, 30, 1, "forward"),
        Piece(30, 40, 2, "forward"),
        Piece(40, 50, 1, "forward"),
        Piece(50, 60, 1, "backward"),
        Piece(60, 70, 2, "backward"),
    ]
    assert join([], apart=2) == []
