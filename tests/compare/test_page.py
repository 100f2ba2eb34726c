"""What the page of a comparison holds: the limits of noise are the terminal's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradscope.compare import diff
from gradscope.compare.page import METRICS, comparison_html, comparison_record
from gradscope.errors import OutputError
from tests.diff_fixtures import MS, around, run
from tests.page import runs


def test_limits_are_those_of_the_comparison() -> None:
    found = diff(*runs.pair()).data
    record = comparison_record(found)
    changes = {layer.path: layer.changes for layer in found.layers}
    for metric in METRICS:
        expected = [changes[row.path][metric].noise for row in found.after.layers]
        assert record["noise"][metric] == expected
    assert record["noise"]["backward_own_ns"][-1] is None  # a new layer
    assert record["totals"] == {change.metric: change.noise for change in found.totals if change.unit == "ns"}
    assert record["warnings"] == [mismatch.text for mismatch in found.mismatches] != []


def test_repeats_have_the_limit_of_their_row() -> None:
    layers = {"": (0,) * 5, "h": (0,) * 5, **{f"h.{i}{b}": around(MS, MS // 10) for i in range(3) for b in ("", ".fc")}}
    found = diff(run(layers), run(layers)).data
    record = comparison_record(found)
    numbers = {row.path: index for index, row in enumerate(found.after.layers)}
    expected = {
        tuple(numbers[path] for path in group.paths): (group.backward.noise, group.forward.noise)
        for group in found.groups
        if len(group.paths) > 1
    }
    assert len(expected) == 2
    assert expected == {
        tuple(group["layers"]): (group["backward_own_ns"], group["forward_self_ns"]) for group in record["groups"]
    }
    # A block with its Linear: the spread of the sum, which is that of both added step by step.
    alone = next(group for group in record["groups"] if found.after.layers[group["layers"][0]].path == "h.0.fc")
    block = next(group for group in record["groups"] if found.after.layers[group["layers"][0]].path == "h.0")
    assert alone["backward_total_ns"] > alone["backward_own_ns"]  # tested together with two rows more
    assert abs(block["backward_total_ns"] - 2 * alone["backward_total_ns"]) <= 1


def test_one_step_says_nothing_about_noise() -> None:
    one = run({"": (0,), "a": (MS,)})
    record = comparison_record(diff(one, one).data)
    assert set(record["noise"]["backward_own_ns"]) == {None}
    assert record["totals"]["backward_ns"] is None


@pytest.mark.parametrize("source", [True, False])
def test_hostile_names_stay_inside_the_data(source: bool) -> None:
    hostile, other = runs.hostile(), runs.gpt()
    for pair in ((hostile, other), (other, hostile)):
        found = diff(*pair).data
        text = comparison_html(found, source)
        assert text.count("</script>") == 2
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        record = json.loads(data)
        assert [run["source"] for run in record["runs"]] == [source, source]
        assert [run["workload"]["target"] for run in record["runs"]] == [run.workload.target for run in pair[::-1]]
        assert ("F.softmax(att, dim=-1)" in data) is source


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    found = diff(*runs.pair())
    path = tmp_path / "diff.html"
    assert found.to_html(path) == path
    found.to_html(path)
    path.write_text("mine")
    with pytest.raises(OutputError, match="was not written by gradscope"):
        found.to_html(path)
    assert path.read_text() == "mine"
    found.to_html(path, force=True)


def test_a_layer_that_is_a_row_of_its_own_has_the_row_s_limit() -> None:
    """The page marks layers, the terminal rows: neither may call real what the other calls noise."""
    repeated = {f"h.{i}{below}": around(MS, MS // 10) for i in range(6) for below in ("", ".fc")}
    layers = {"": around(MS, MS // 10), "h": (0,) * 5, **repeated}
    found = diff(run(layers), run({**layers, "": around(MS, MS // 20)})).data
    (alone,) = (group for group in found.groups if group.paths == ("",))
    by_path = {layer.path: layer.changes for layer in found.layers}
    assert alone.backward.noise == by_path[""]["backward_own_ns"].noise
