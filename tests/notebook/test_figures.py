"""What the figures hold, against the run: every value, folding, pruning, and errors."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import gradscope
from gradscope.compare import diff
from gradscope.errors import UsageError
from gradscope.report import Report
from gradscope.report.figures import plotly_text
from gradscope.report.figures.flame import build_frames
from gradscope.report.figures.frame import FlameFrame
from gradscope.report.figures.options import FlameOptions
from gradscope.report.figures.prune import prune
from gradscope.tables import RunData
from tests import diff_fixtures
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

METRICS = ("backward", "forward", "both", "saved")
EVERYTHING: dict[str, Any] = {"min_percent": 0, "max_frames": 1_000_000}


def _own(figure: Any) -> dict[str, int]:
    """Value less those of the children, by id; asserted to be no less than nothing."""
    trace = figure.data[0]
    own = dict(zip(trace.ids, trace.values, strict=True))
    for parent, value in zip(trace.parents, trace.values, strict=True):
        if parent:
            own[parent] -= value
    assert all(value >= 0 for value in own.values())
    return own


def _whole(run: RunData, metric: str) -> int:
    saved = 0 if run.memory is None else run.memory.saved_bytes
    forward = run.step.forward_ns
    backward = run.ledger.backward_ns
    return {"backward": backward, "forward": forward, "both": forward + backward, "saved": saved}[metric]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("metric", METRICS)
def test_frames_add_up_to_the_ledger(metric: Any, merge: bool) -> None:
    run = memory_fixtures.gpt(12)
    figure = Report(run).flamegraph(metric, merge=merge)
    trace = figure.data[0]
    assert trace.branchvalues == "total"
    assert trace.parents.count("") == 1
    assert trace.values[0] == sum(_own(figure).values()) == _whole(run, metric)


@pytest.mark.parametrize("seed", range(40))
def test_any_run_adds_up_at_any_size(seed: int) -> None:
    run = fixtures.random_run(seed)
    for metric in ("backward", "forward", "both"):
        if not _whole(run, metric):
            continue
        for most, least in ((300, 0.1), (5, 0), (2, 0), (1_000_000, 0)):
            figure = Report(run).flamegraph(metric, max_frames=most, min_percent=least)
            assert len(figure.data[0].ids) <= most
            assert figure.data[0].values[0] == sum(_own(figure).values()) == _whole(run, metric)
            assert all(value > 0 for value in figure.data[0].values)


def test_each_layer_has_the_values_of_the_run() -> None:
    run = fixtures.gpt(3)
    root = build_frames(run, FlameOptions(merge=False, **EVERYTHING))
    layers = {frame.title: frame for frame in root.walk() if frame.kind == "layer"}
    for row in run.layers:
        if row.path == "transformer.h":  # a list that is never called
            continue
        frame = layers[row.path or "GPT"]
        own = row.backward_self_ns + row.accumulate_ns + row.recompute_ns + row.gradient_sum_ns
        assert frame.value == row.backward_total_ns
        assert frame.value - sum(child.value for child in frame.children if child.kind == "layer") == own
        # Operations are all of a layer's own time.
        assert sum(child.value for child in frame.children if child.kind == "operation") == own
    parts = {frame.name: frame.value for frame in root.children if frame.kind == "part"}
    assert parts["autograd overhead"] == run.ledger.engine_ns


def test_repeats_are_one_frame_with_their_sum() -> None:
    run = fixtures.gpt(12)
    root = build_frames(run, FlameOptions(**EVERYTHING))
    values = {frame.title: frame.value for frame in root.walk() if frame.kind == "layer"}
    sums: dict[str, int] = defaultdict(int)
    for row in run.layers:
        parts = row.path.split(".")
        if parts[:2] == ["transformer", "h"] and len(parts) > 2:
            sums[".".join(["transformer", "h", "*", *parts[3:]])] += row.backward_total_ns
    assert {title: value for title, value in values.items() if "*" in title} == dict(sums)


def _tree() -> FlameFrame:
    def layer(name: str, value: int, *children: FlameFrame) -> FlameFrame:
        return FlameFrame(name, value, "layer", "#000000", layers=1, children=list(children))

    return layer(
        "root", 100, layer("a", 60, layer("a1", 40), layer("a2", 3), layer("a3", 2)), layer("b", 0), layer("c", 4)
    )


def _shown(frame: FlameFrame) -> Any:
    return (frame.name, frame.value, [_shown(child) for child in frame.children])


def test_small_frames_become_other() -> None:
    pruned = prune(_tree(), least=5, most=100)
    # A single small one is drawn itself: "other" would be as many frames.
    inside = ("a", 60, [("a1", 40, []), ("other (2 layers)", 5, [])])
    assert _shown(pruned.root) == ("root", 100, [inside, ("c", 4, [])])
    assert (pruned.words, pruned.value, pruned.largest) == ("2 layers", 5, 3)


def test_too_many_frames_become_other() -> None:
    pruned = prune(_tree(), least=0, most=3)
    assert _shown(pruned.root) == ("root", 100, [("a", 60, []), ("c", 4, [])])
    assert pruned.root.children[0].about == ("inside, not drawn: 3 layers",)
    assert (pruned.words, pruned.value, pruned.largest) == ("3 layers", 45, 40)


def test_what_was_left_out_is_said() -> None:
    figure = Report(fixtures.gpt(200)).flamegraph(max_frames=20)
    words = figure.layout.annotations[0].text
    assert "Repeated blocks are one frame, ×N" in words
    assert "are not drawn by themselves" in words.replace("<br>", " ")
    assert "max_frames=20" in words
    assert len(figure.data[0].ids) <= 20
    assert "not drawn" not in Report(fixtures.mlp()).flamegraph(**EVERYTHING).layout.annotations[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "time"}, "metric must be one of backward, forward, both, saved; got 'time'."),
        ({"merge": 1}, "merge must be True or False; got 1."),
        ({"max_frames": 1}, "max_frames must be a whole number, 2 or more; got 1."),
        ({"max_frames": 2.5}, "max_frames must be a whole number, 2 or more; got 2.5."),
        ({"min_percent": -1}, "min_percent must be between 0 and 100; got -1."),
        ({"min_percent": "1"}, "min_percent must be between 0 and 100; got '1'."),
        ({"title": 3}, "title must be a string, or None for the usual one; got 3."),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    run = fixtures.mlp()
    for made in (Report(run), diff(run, run)):
        with pytest.raises(UsageError) as error:
            made.flamegraph(**options)
        assert str(error.value) == message


def test_memory_that_was_not_measured_says_what_to_do() -> None:
    run = fixtures.gpt(2)
    with pytest.raises(UsageError, match=r"memory was not measured in this run(.|\n)*without --no-memory"):
        Report(run).flamegraph("saved")
    with pytest.raises(UsageError, match=r"memory was not measured in this run(.|\n)*memory=True"):
        Report(run).memory_timeline()
    with pytest.raises(UsageError, match="memory was not measured in the run before"):
        diff(run, memory_fixtures.gpt(2)).flamegraph("saved")


def test_a_pass_that_took_no_time_has_no_figure() -> None:
    builder = fixtures.RunBuilder()
    builder.add("", "Net", 10)
    with pytest.raises(UsageError, match="the forward pass of this run is 0 ns: there is nothing to draw"):
        Report(builder.build()).flamegraph("forward")


def test_the_timeline_is_that_of_the_run() -> None:
    run = memory_fixtures.mlp()
    memory = run.memory
    assert memory is not None
    figure = Report(run).memory_timeline(title="<b>mine</b>")
    line = next(trace for trace in figure.data if trace.name == "allocated")
    assert line.line.shape == "hv"
    assert list(zip(line.x, line.y, strict=True)) == [(point.ns / 1e9, point.bytes) for point in memory.timeline]
    peak = next(trace for trace in figure.data if trace.name == "peak")
    assert (peak.x, peak.y) == ((memory.peak_ns / 1e9,), (memory.peak_bytes,))
    named = [annotation.text for annotation in figure.layout.annotations]
    assert named == ["forward", "backward", "optimizer", "peak 64.3 kB in backward"]
    assert figure.layout.title.text == "&lt;b&gt;mine&lt;/b&gt;"


def test_bands_add_up_to_the_line() -> None:
    run = memory_fixtures.mlp()
    memory = run.memory
    assert memory is not None
    older = Report(dataclasses.replace(run, memory=dataclasses.replace(memory, categories=None))).memory_timeline()
    assert [trace.name for trace in older.data] == ["allocated", "peak"]
    if memory.categories is not None:
        figure = Report(run).memory_timeline()
        bands = [trace.y for trace in figure.data if trace.stackgroup]
        line = next(trace.y for trace in figure.data if trace.name == "allocated")
        assert [sum(values) for values in zip(*bands, strict=True)] == list(line)


def test_figures_of_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    report = Report(memory_fixtures.gpt(3))
    loaded = gradscope.load_report(report.save(tmp_path / "run.json"))
    assert loaded.flamegraph("saved").to_json() == report.flamegraph("saved").to_json()
    assert loaded.memory_timeline().to_json() == report.memory_timeline().to_json()


def test_names_are_no_markup() -> None:
    assert plotly_text.name("<b>x</b> & $y$") == "&lt;b&gt;x&lt;/b&gt; &amp; &#36;y&#36;"
    assert plotly_text.name("a\0b\u202e") == "a\\x00b\\u202e"
    assert len(plotly_text.cut("x" * 4_000)) == 48


# -- comparison --------------------------------------------------------------------------------------------------------

MS = diff_fixtures.MS
AROUND = diff_fixtures.around


def _pair() -> Any:
    before = diff_fixtures.run({"": [MS] * 5, "a": [40 * MS] * 5, "b": [20 * MS] * 5, "gone": [9 * MS] * 5})
    after = diff_fixtures.run({"": [MS] * 5, "a": [80 * MS] * 5, "b": [20 * MS] * 5, "fresh": [5 * MS] * 5})
    return diff(before, after)


def test_a_comparison_draws_the_run_after_coloured_by_change() -> None:
    figure = _pair().flamegraph()
    trace = figure.data[0]
    frames = dict(zip(trace.labels, zip(trace.values, trace.marker.colors, strict=True), strict=True))
    assert frames["a"] == (80 * MS, "#ee8a3c")  # twice: all of orange
    assert frames["b"] == (20 * MS, "#d5d8de")
    assert trace.values[0] == 106 * MS
    shapes = dict(zip(trace.labels, trace.marker.pattern.shape, strict=True))
    assert [name for name, shape in shapes.items() if shape] == ["fresh"]
    assert "Removed, and not drawn: gone (9.00 ms)." in figure.layout.annotations[0].text
    hover = dict(zip(trace.labels, trace.hovertext, strict=True))
    assert "40.0 ms → 80.0 ms, +40.0 ms, +100.0 %" in hover["a"]


def test_what_is_within_noise_is_grey() -> None:
    apart = AROUND(0, 4 * MS)
    before = diff_fixtures.run({"": [MS] * 5, "a": AROUND(40 * MS, 4 * MS)}, wall=apart)
    after = diff_fixtures.run({"": [MS] * 5, "a": AROUND(41 * MS, 4 * MS)}, wall=apart)
    trace = diff(before, after).flamegraph().data[0]
    assert set(trace.marker.colors) == {"#d5d8de"}
    assert "within the noise of" in trace.hovertext[trace.labels.index("a")]


@pytest.mark.parametrize("metric", METRICS)
def test_a_comparison_adds_up_to_the_run_after(metric: Any) -> None:
    before, after = memory_fixtures.gpt(4), memory_fixtures.gpt(6)
    figure = diff(before, after).flamegraph(metric)
    assert figure.data[0].values[0] == sum(_own(figure).values()) == _whole(after, metric)


def test_layers_in_compiled_code_are_not_said_to_be_never_called() -> None:
    def words(**more: Any) -> set[str]:
        layers = [dataclasses.replace(row, calls=0.0, **more) for row in run.layers]
        frames = build_frames(dataclasses.replace(run, layers=layers), FlameOptions())
        return {frame.about[-1] for frame in frames.walk() if frame.kind == "layer" and frame.value}

    run = fixtures.gpt(4)
    assert words() == {"never called itself"}
    assert words(estimated_ns=0) == {"in compiled code"}
