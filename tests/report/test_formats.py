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

from gradscope.cli.show import CsvTable
from gradscope.errors import UsageError
from gradscope.report import Report
from gradscope.report.csvfile import TABLE_NAMES
from gradscope.report.view import build_view
from gradscope.tables import RunData
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

SCHEMA = json.loads((Path(__file__).parents[1] / "data/speedscope/file-format-schema.json").read_text(encoding="utf-8"))
RUNS = {
    "gpt": fixtures.gpt(3, findings=fixtures.findings()),
    "cuda": fixtures.gpt(2, cuda=True, recompute=True),
    "mlp": fixtures.mlp(),
    "gan": fixtures.gan(),
    "empty": fixtures.RunBuilder().build(),
    "memory": memory_fixtures.gpt(3, leak=True),
}


# -- DataFrames --------------------------------------------------------------------------------------------------------


def test_frames_have_the_columns_of_the_file() -> None:
    report = Report(RUNS["cuda"])
    assert list(report.layers.columns[:6]) == ["path", "class", "parent", "calls", "parameters", "source"]
    assert list(report.ops.columns) == ["layer", "phase", "name", "calls", "self_ns", "shape"]
    assert list(report.kernels.columns) == ["layer", "phase", "name", "calls", "device_ns", "op", "busy_ns"]
    assert list(report.lines.columns) == [
        *("file", "line", "function", "text", "layer", "forward_ns", "backward_ns"),
        *("saved_bytes", "allocated_bytes", "copied_bytes"),
    ]
    assert list(report.ledger.columns) == ["row", "ns", "share"]
    assert list(report.memory.columns) == ["owner", "category", "bytes"]
    assert list(report.saved.columns) == [
        *("layer", "line", "node", "what", "shape", "dtype", "count", "bytes", "at_peak_bytes"),
    ]
    assert list(report.held.columns) == ["layer", "line", "op", "count", "bytes"]
    assert list(report.copies.columns) == ["layer", "line", "phase", "op", "calls", "bytes"]
    assert list(report.retained.columns) == ["layer", "line", "op", "phase", "count", "bytes", "grows"]
    assert list(report.timeline.columns) == ["ns", "bytes"]
    assert list(report.phases.columns) == ["phase", "start_ns", "end_ns"]
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
    assert pd.isna(layers.loc["transformer", "saved_bytes"])
    measured = Report(memory_fixtures.mlp()).layers.set_index("path")
    assert measured.loc["0", "saved_bytes"] == 0
    assert measured.loc["1", "forward_allocated_bytes"] == 16_384


def test_frames_of_memory() -> None:
    run = RUNS["memory"]
    report, memory = Report(run), run.memory
    assert memory is not None
    assert report.memory["bytes"].sum() == memory.peak_bytes
    assert report.saved["bytes"].sum() == memory.saved_bytes
    assert report.held["bytes"].sum() == memory.held_bytes
    assert report.copies["bytes"].sum() == memory.copied_bytes
    assert report.retained["bytes"].sum() == memory.retained_after_step_bytes
    assert report.timeline["bytes"].max() == memory.peak_bytes
    assert report.saved["bytes"].dtype == "int64"
    assert report.retained["grows"].dtype == "bool"
    assert report.retained["grows"].tolist() == [False, True, True, True]
    assert report.copies["layer"].isna().sum() == 1
    frames = ("memory", "saved", "held", "copies", "retained", "timeline", "phases")
    assert all(len(getattr(report, name)) for name in frames)
    assert not any(len(getattr(Report(RUNS["gpt"]), name)) for name in frames)
    first = Report(memory_fixtures.mlp()).memory.iloc[0].to_dict()
    assert first == {"owner": "0", "category": "parameters", "bytes": 16_640}


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_the_command_line_knows_every_table() -> None:
    assert [table.value for table in CsvTable] == list(TABLE_NAMES)


def test_csv_of_memory() -> None:
    text = Report(memory_fixtures.mlp()).to_csv("saved")
    assert text == (
        "layer,line,node,what,shape,dtype,count,bytes,at_peak_bytes\n"
        "1,mlp.py:14,ReluBackward0,result,32x64,float32,1,8192,\n"
        ",mlp.py:22,LogSoftmaxBackward0,result,32x10,float32,1,1280,\n"
        ",,NllLossBackward0,total_weight,1,float32,1,4,\n"
    )
    assert Report(RUNS["gpt"]).to_csv("saved") == text.partition("\n")[0] + "\n"


@pytest.mark.parametrize("name", ["gpt", "memory"])
@pytest.mark.parametrize("table", TABLE_NAMES)
def test_csv_reads_back(table: str, name: str) -> None:
    report = Report(RUNS[name])
    rows = list(csv.DictReader(io.StringIO(report.to_csv(table))))
    frame = getattr(report, table)
    assert len(rows) == len(frame)
    if table != "ledger":
        columns = next(csv.reader(io.StringIO(report.to_csv(table))))
        assert columns == list(frame.columns)
    if table == "layers":
        assert sum(int(row["backward_self_ns"]) for row in rows) == report.data.ledger.layers_ns
        assert rows[0]["device_ns"] == ""
        assert rows[2]["tied"] == ("lm_head.weight" if name == "gpt" else "")
    if table == "ledger":
        assert sum(int(row["ns"]) for row in rows) == report.data.ledger.backward_ns


def test_csv_of_an_unknown_table() -> None:
    with pytest.raises(UsageError) as caught:
        Report(RUNS["gpt"]).to_csv("layer")
    assert str(caught.value) == (
        "no table 'layer' in a report; there are layers, lines, ops, kernels, findings, memory, saved, held, copies, "
        "retained, timeline, phases, ledger."
    )


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table_of(markdown: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, header and rule left out."""
    body = markdown.split(f"#### {title}\n\n", 1)[1].split("\n#### ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_markdown_shows_the_folded_tree_lines_and_ledger() -> None:
    text = Report(RUNS["gpt"]).to_markdown(full=True)
    layers = table_of(text, "Layers")
    assert layers[0][:2] == ["`GPT`", ""]
    assert [row[0].replace("&nbsp;", "") for row in layers[:4]] == ["`GPT`", "`transformer`", "`h.0-h.2` ×3", "`attn`"]
    assert layers[-2][0].startswith("… ")
    assert layers[-1][0] == "outside the layers"
    assert table_of(text, "Source lines")[0][0] == "`examples/gpt.py:53`"
    assert table_of(text, "Backward breakdown")[-1][0] == "**all of backward**"
    assert "1. **critical**: attention is computed by hand" in text


@pytest.mark.parametrize("seed", range(60))
def test_markdown_rows_add_up(seed: int) -> None:
    run = fixtures.random_run(seed)
    if not run.step.backward_ns:
        return
    for options in ({}, {"min_percent": 25.0}, {"depth": 1}):
        rows = table_of(Report(run).to_markdown(**options), "Layers")
        whole = [row for row in rows if not row[0].startswith(("&nbsp;", "…"))]
        percents = [float(row[3].removesuffix(" %").removeprefix("&lt;")) for row in whole]
        assert sum(percents) == pytest.approx(100, abs=0.051 * len(percents))
        selves = [float(row[4].removeprefix("&lt;")) for row in rows if row[4]]
        head = Report(run).to_markdown().split("| bwd ")[1].split(" ")[0]
        unit = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[head]
        assert sum(selves) * unit == pytest.approx(run.ledger.layers_ns, abs=0.1 * unit * len(selves))


def test_markdown_of_memory() -> None:
    text = Report(memory_fixtures.gpt(leak=True, cuda=True)).to_markdown(full=True)
    assert "- **memory**: peak 22.4 GB in backward (GPT) · saved for backward 17.6 GB · LEAK: 302 MB more" in text
    assert table_of(text, "Layers")[0][-2] == "17.6 GB"
    assert table_of(text, "Source lines")[0] == [
        *("`examples/gpt.py:53`", "6.71", "53.3 %", "302 MB", "`lm_head`"),
        "`q, k, v = self.c_attn(x).split(self.n_embd, dim=2)`",
    ]
    assert table_of(text, "Source lines")[-1] == ["no source line", "0.80", "6.3 %", "731 MB", "", ""]
    assert "22.4 GB in backward, at 5.75 s of 16.8 s, while GPT ran LogSoftmaxBackward0\n" in text
    assert "- **by kind**: saved activations" in text
    assert table_of(text, "Memory at peak, by owner") == [
        ["`transformer.h.*.attn`", "10.6 GB", "47.2 %", "saved activations"],
        ["`GPT`", "1.65 GB", "7.4 %", "saved activations"],
        ["`GPT`", "1.65 GB", "7.4 %", "temporaries"],
        ["`lm_head`", "1.65 GB", "7.3 %", "other activations"],
        ["`transformer.h.*.attn.attn_dropout`", "1.21 GB", "5.4 %", "saved activations"],
        ["`transformer.h.*.mlp.gelu`", "1.21 GB", "5.4 %", "saved activations"],
        ["… 30 more", "4.46 GB", "19.9 %", ""],
        ["**all of the peak**", "**22.4 GB**", "**100.0 %**", ""],
    ]
    assert table_of(text, "Saved for backward")[0] == [
        *("softmax output 8x12x1024x1024 float32", "4.83 GB", "27.5 %", "12", "403 MB"),
        *("`examples/gpt.py:60`", "`transformer.h.*.attn`"),
    ]
    assert table_of(text, "Retained after the step")[0] == [
        *(
            "LEAK aten::add, forward",
            "302 MB",
            "15.5 %",
            "12",
            "25.2 MB",
            "`examples/gpt.py:92`",
            "`transformer.h.*`",
        )
    ]
    assert len(table_of(text, "Held by Python")) == 1
    assert table_of(text, "Copies")[-1] == ["… 1 more", "8.19 kB", "0.0 %", "", "", "", ""]
    assert "#### On cuda:0\n\nat the peak: allocated 22.4 GB · reserved 24.3 GB, 1.86 GB of it unused" in text
    by_memory = Report(memory_fixtures.mlp()).to_markdown(sort="memory")
    assert table_of(by_memory, "Layers")[-1] == ["outside the layers", "", "1.28 kB", "13.6 %", *[""] * 7]
    assert "Memory at peak" not in Report(RUNS["gpt"]).to_markdown()


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
    for group in build_view(run).ops:
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
    assert spent["(outside the layers) > (autograd overhead) > (engine)"] == run.ledger.engine_ns
    assert {"name": "GPT", "file": "examples/gpt.py", "line": 101} in frames
