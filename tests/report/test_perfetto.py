"""The step over time in the Trace Event Format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.errors import RunFileError, UsageError
from gradscope.report.perfetto import to_perfetto
from gradscope.report.runfile import from_json, to_json
from gradscope.tables import LayerSpan


@pytest.fixture(scope="module")
def report() -> gradscope.Report:
    model = nn.Sequential(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 256))
    return gradscope.profile(model, torch.ones(512, 256), steps=1, warmup=1)


def slices(text: str, track: int) -> list[dict[str, Any]]:
    return [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X" and one["tid"] == track]


def events(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def with_memory(report: gradscope.Report, **values: Any) -> str:
    """The trace of the report's run, with other figures of its memory."""
    assert report.data.memory is not None
    return to_perfetto(replace(report.data, memory=replace(report.data.memory, **values)))


def test_layers_nest_and_cover_what_ran(report: gradscope.Report) -> None:
    memory = report.data.memory
    assert memory is not None and memory.spans
    text = report.to_perfetto()
    layers = slices(text, 2)
    assert {one["args"]["layer"] for one in layers} >= {"0.0", "1"}
    assert {one["args"]["phase"] for one in layers} >= {"forward", "backward"}
    # Each stretch of a layer is inside a slice of it.
    for span in memory.spans:
        assert any(
            one["args"]["layer"] == span.layer
            and one["ts"] <= span.start_ns / 1e3 + 1e-6
            and span.end_ns / 1e3 <= one["ts"] + one["dur"] + 1e-6
            for one in layers
        )
    # No two overlap but one inside the other, as a track of Perfetto's must be.
    for one in layers:
        for other in layers:
            first, last = sorted((one, other), key=lambda each: (each["ts"], -each["dur"]))
            assert last["ts"] >= first["ts"] + first["dur"] - 1e-3 or (
                last["ts"] + last["dur"] <= first["ts"] + first["dur"] + 1e-3
            )


def test_phases_and_memory(report: gradscope.Report) -> None:
    memory = report.data.memory
    assert memory is not None
    text = report.to_perfetto()
    assert [one["name"] for one in slices(text, 1)] == [one.phase for one in memory.phases]
    counters = [one for one in json.loads(text)["traceEvents"] if one["ph"] == "C"]
    assert [sum(one["args"].values()) for one in counters] == [point.bytes for point in memory.timeline]
    assert [one["ts"] for one in counters] == [point.ns / 1e3 for point in memory.timeline]
    assert memory.categories and set(counters[0]["args"]) == {one.category for one in memory.categories}


def test_of_an_older_run_one_counter_has_all_memory(report: gradscope.Report) -> None:
    memory = report.data.memory
    assert memory is not None
    counters = [one for one in events(with_memory(report, categories=None)) if one["ph"] == "C"]
    assert [one["args"] for one in counters] == [{"allocated": point.bytes} for point in memory.timeline]


def test_tracks_and_slices_have_the_names_of_what_they_show(report: gradscope.Report) -> None:
    text = with_memory(report, spans_left_out=None)
    names = {one["tid"]: one["args"]["name"] for one in events(text) if one["name"] == "thread_name"}
    assert names == {1: "phases", 2: "layers"}
    for one in slices(text, 2):
        assert one["name"] == (one["args"]["layer"] or "Sequential")


def test_stretches_that_are_left_out_are_said(report: gradscope.Report) -> None:
    for left_out, title in ((0, "layers"), (1800, "layers (1800 shorter stretches are left out)")):
        found = events(with_memory(report, spans_left_out=left_out))
        assert [one["args"]["name"] for one in found if one["name"] == "thread_name" and one["tid"] == 2] == [title]


def test_of_layers_of_the_same_time_the_outer_comes_first(report: gradscope.Report) -> None:
    """A viewer puts the second of two of the same time into the first."""
    spans = [
        LayerSpan("0.0", "forward", 0, 1_000),
        LayerSpan("1", "forward", 1_000, 1_500),
        LayerSpan("0.1", "backward", 2_000, 2_500),
    ]
    found = slices(with_memory(report, spans=spans), 2)
    assert [one["args"]["layer"] for one in found] == ["", "0", "0.0", "1", "", "0", "0.1"]
    assert [one["ts"] for one in found] == sorted(one["ts"] for one in found)


@pytest.mark.parametrize(
    "spans",
    [
        [LayerSpan("1", "forward", 0, 1_000), LayerSpan("0.0", "forward", 999, 2_000)],
        [LayerSpan("1", "forward", 1_000, 2_000), LayerSpan("0.0", "forward", 0, 1_000)],
        [LayerSpan("1", "forward", 1_000, 999)],
    ],
)
def test_a_run_whose_stretches_overlap_is_damaged(spans: list[LayerSpan], report: gradscope.Report) -> None:
    """They would lie across each other, which no track can show."""
    memory = report.data.memory
    assert memory is not None
    with pytest.raises(RunFileError, match=r"damaged: memory.spans\[\d\] is from -?\d+ to \d+ ns, and the one before"):
        from_json(to_json(replace(report.data, memory=replace(memory, spans=spans))))


def test_a_layer_that_comes_back_in_another_phase_is_another_slice(report: gradscope.Report) -> None:
    memory = report.data.memory
    assert memory is not None
    spans = [
        LayerSpan("0.0", "forward", 0, 1_000),
        LayerSpan("0.1", "forward", 1_000, 1_500),
        LayerSpan("0.1", "backward", 2_000, 2_500),
        LayerSpan("0.0", "backward", 2_500, 4_000),
    ]
    found = slices(to_perfetto(replace(report.data, memory=replace(memory, spans=spans))), 2)
    of_parent = [(one["args"]["phase"], one["ts"], one["dur"]) for one in found if one["args"]["layer"] == "0"]
    assert of_parent == [("forward", 0, 1.5), ("backward", 2.0, 2.0)]


def test_without_memory_there_are_no_times(report: gradscope.Report) -> None:
    with pytest.raises(UsageError, match="measured with memory"):
        to_perfetto(replace(report.data, memory=None))
