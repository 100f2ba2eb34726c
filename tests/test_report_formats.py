"""DataFrames, CSV, Markdown and speedscope."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest

from gradscope.errors import UsageError
from gradscope.report import Report
from gradscope.report.csvfile import TABLE_NAMES
from gradscope.tables import RunData
from tests import report_fixtures as fixtures

SCHEMA = json.loads((Path(__file__).parent / "data/speedscope/file-format-schema.json").read_text(encoding="utf-8"))
RUNS = {
    "gpt": fixtures.gpt(3, findings=fixtures.findings()),
    "cuda": fixtures.gpt(2, cuda=True, recompute=True),
    "mlp": fixtures.mlp(),
    "gan": fixtures.gan(),
    "empty": fixtures.RunBuilder().build(),
}


# -- DataFrames --------------------------------------------------------------------------------------------------------


def test_frames_have_the_columns_of_the_file() -> None:
    report = Report(RUNS["cuda"])
    assert list(report.layers.columns[:6]) == ["path", "class", "parent", "calls", "parameters", "source"]
    assert list(report.ops.columns) == ["layer", "phase", "name", "calls", "self_ns", "shape"]
    assert list(report.kernels.columns) == ["layer", "phase", "name", "calls", "device_ns"]
    assert list(report.lines.columns) == [
        *("file", "line", "function", "text", "layer", "forward_ns", "backward_ns", "saved_bytes")
    ]
    assert list(report.ledger.columns) == ["row", "ns", "share"]
    assert list(report.memory.columns) == ["owner", "category", "bytes"]
    assert list(report.step.columns) == ["phase", "ns", "share", "min_ns", "median_ns", "max_ns", "std_ns"]
    assert "recipe" in report.findings.columns
    assert report.layers is report.layers  # made once


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_frames_add_up(run: RunData) -> None:
    report = Report(run)
    ledger = dict(zip(report.ledger["row"], report.ledger["ns"], strict=True))
    assert report.ledger["ns"].sum() == run.step.backward_ns
    assert report.layers["backward_self_ns"].sum() == ledger["layers_ns"]
    assert report.layers["accumulate_ns"].sum() == ledger["accumulate_ns"]
    step = report.step.set_index("phase")["ns"]
    assert step.drop("wall").sum() == step["wall"]
    assert report.layers["backward_self_ns"].dtype == "int64"


def test_missing_is_not_zero() -> None:
    layers = Report(RUNS["cuda"]).layers.set_index("path")
    assert layers["device_ns"].dtype == "Int64"
    assert pd.isna(layers.loc["transformer", "device_ns"])
    assert layers.loc["transformer.drop", "backward_self_ns"] == 0
    measured = fixtures.mlp(memory={"at_peak": [{"owner": "0", "category": "saved", "bytes": 7}]})
    assert Report(measured).memory.to_dict("records") == [{"owner": "0", "category": "saved", "bytes": 7}]


# -- CSV ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLE_NAMES)
def test_csv_reads_back(table: str) -> None:
    report = Report(RUNS["gpt"])
    rows = list(csv.DictReader(io.StringIO(report.to_csv(table))))
    frame = getattr(report, table)
    assert len(rows) == len(frame)
    if table != "ledger":
        columns = next(csv.reader(io.StringIO(report.to_csv(table))))
        assert columns == list(frame.columns)
    if table == "layers":
        assert sum(int(row["backward_self_ns"]) for row in rows) == report.data.ledger.layers_ns
        assert rows[0]["device_ns"] == ""
        assert rows[2]["tied"] == "lm_head.weight"
    if table == "ledger":
        assert sum(int(row["ns"]) for row in rows) == report.data.ledger.backward_ns


def test_csv_of_an_unknown_table() -> None:
    with pytest.raises(UsageError) as caught:
        Report(RUNS["gpt"]).to_csv("layer")
    message = "no table 'layer' in a report; there are layers, lines, ops, kernels, findings, ledger."
    assert str(caught.value) == message


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table_of(markdown: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, header and rule left out."""
    body = markdown.split(f"#### {title}\n\n", 1)[1].split("\n\n", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_markdown_shows_the_folded_tree_lines_and_ledger() -> None:
    text = Report(RUNS["gpt"]).to_markdown()
    layers = table_of(text, "Layers")
    assert layers[0][:3] == ["`GPT`", "", layers[0][2]]
    assert [row[0].replace("&nbsp;", "") for row in layers[:4]] == ["`GPT`", "`transformer`", "`h.0-h.2` ×3", "`attn`"]
    assert layers[-2][0].startswith("… ")
    assert layers[-1][0] == "outside the layers"
    assert table_of(text, "Source lines")[0][0] == "`examples/gpt.py:53`"
    assert table_of(text, "What the backward is made of")[-1][0] == "**all of backward**"
    assert "- **critical**: attention is computed by hand" in text


@pytest.mark.parametrize("seed", range(60))
def test_markdown_rows_add_up(seed: int) -> None:
    run = fixtures.random_run(seed)
    if not run.step.backward_ns:
        return
    for options in ({}, {"min_percent": 25.0}, {"depth": 1}):
        rows = table_of(Report(run).to_markdown(**options), "Layers")
        whole = [row for row in rows if not row[0].startswith(("&nbsp;", "…"))]
        percents = [float(row[2].removesuffix(" %").lstrip("<")) for row in whole]
        assert sum(percents) == pytest.approx(100, abs=0.051 * len(percents))
        selves = [float(row[4].lstrip("<")) for row in rows if row[4]]
        head = Report(run).to_markdown().split("self ")[1].split(" ")[0]
        unit = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[head]
        assert sum(selves) * unit == pytest.approx(run.ledger.layers_ns, abs=0.1 * unit * len(selves))


def test_markdown_cannot_be_broken_by_names() -> None:
    run = fixtures.mlp()
    odd = dataclasses.replace(run.lines[0], text="a | b ``` <script>", file="we|ird`.py")
    text = Report(dataclasses.replace(run, lines=(odd,), notes=("<b>*x*</b> | [l](u)\nnext",))).to_markdown()
    assert [len(row) for row in table_of(text, "Source lines")] == [5, 5]
    assert "- &lt;b&gt;\\*x\\*&lt;/b&gt; \\| \\[l\\](u) next\n" in text
    assert "we\\|ird'.py" in text


# -- speedscope --------------------------------------------------------------------------------------------------------


def speedscope(run: RunData) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Report(run).to_speedscope())
    jsonschema.validate(record, SCHEMA)
    return record


def check_profiles(run: RunData, record: dict[str, Any]) -> None:
    frames = len(record["shared"]["frames"])
    for profile, whole in zip(record["profiles"], (run.step.backward_ns, run.step.forward_ns), strict=True):
        assert profile["unit"] == "nanoseconds"
        assert sum(profile["weights"]) == profile["endValue"] == whole
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(weight > 0 for weight in profile["weights"])
        assert all(stack and max(stack) < frames for stack in profile["samples"])


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_speedscope_is_valid_and_adds_up(run: RunData) -> None:
    check_profiles(run, speedscope(run))


@pytest.mark.parametrize("seed", range(40))
def test_speedscope_of_random_runs_with_and_without_operations(seed: int) -> None:
    run = fixtures.random_run(seed)
    check_profiles(run, speedscope(run))
    bare = dataclasses.replace(run, ops=run.ops[::3])
    check_profiles(bare, speedscope(bare))


def test_communication_of_a_layer_is_counted_once() -> None:
    run = fixtures.mlp(communication=5_000)
    ops = tuple(dataclasses.replace(op, layer="0") if op.phase == "communication" else op for op in run.ops)
    run = dataclasses.replace(run, ops=ops)
    check_profiles(run, speedscope(run))
    for group in Report(run).view().ops:
        assert sum(op.ns for op in group.ops) + group.more_ns == group.ns


def test_the_schema_would_notice() -> None:
    record = speedscope(RUNS["gpt"])
    record["profiles"][0]["unit"] = "ns"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, SCHEMA)


def test_speedscope_stacks_are_the_layers_down_to_the_operation() -> None:
    run = RUNS["cuda"]
    record = speedscope(run)
    frames = record["shared"]["frames"]
    backward = record["profiles"][0]
    spent: dict[str, int] = {}
    for stack, weight in zip(backward["samples"], backward["weights"], strict=True):
        key = " > ".join(frames[i]["name"] for i in stack)
        spent[key] = spent.get(key, 0) + weight
    block = "GPT > transformer ModuleDict > transformer.h ModuleList > transformer.h.0 Block"
    bmm = next(op for op in run.ops if op.layer == "transformer.h.0.attn" and op.name == "BmmBackward0")
    assert spent[f"{block} > transformer.h.0.attn Attention > BmmBackward0"] == bmm.self_ns
    again = f"{block} > transformer.h.0.attn Attention > (recompute) > aten::addmm"
    assert spent[again] == next(row.recompute_ns for row in run.layers if row.path == "transformer.h.0.attn")
    assert spent["(outside the layers) > (engine) > (engine)"] == run.ledger.engine_ns
    assert {"name": "GPT", "file": "examples/gpt.py", "line": 101} in frames
