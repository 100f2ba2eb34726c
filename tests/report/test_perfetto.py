"""The step over time in the Trace Event Format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.errors import UsageError
from gradscope.report.perfetto import to_perfetto
from gradscope.tables import LayerSpan


@pytest.fixture(scope="module")
def report() -> gradscope.Report:
    model = nn.Sequential(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 256))
    return gradscope.profile(model, torch.ones(512, 256), steps=1, warmup=1)


def slices(text: str, track: int) -> list[dict[str, Any]]:
    return [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X" and one["tid"] == track]


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
