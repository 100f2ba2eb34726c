"""RUN.json: round trip, form, errors word for word, and how files are written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradscope.errors import OutputError, RunFileError
from gradscope.report import Report, load
from gradscope.report.outfile import check_output
from gradscope.report.runfile import from_json, to_json
from gradscope.tables import (
    CategoryCourse,
    CopyRow,
    Finding,
    HeldRow,
    HolderRow,
    KernelRow,
    LayerRow,
    LayerSpan,
    Ledger,
    LineRow,
    MemoryCategory,
    MemoryInfo,
    OpRow,
    OwnerCourse,
    PhaseSpan,
    RetainedRow,
    RunData,
    SavedRow,
    Spread,
    StepTimes,
    TimelinePoint,
    WorkloadInfo,
)
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

RUNS = {
    "gpt": fixtures.gpt(),
    "cuda": fixtures.gpt(2, cuda=True, recompute=True, findings=fixtures.findings(), notes=("a", "b")),
    "memory": memory_fixtures.gpt(2, leak=True),
    "memory of a device": memory_fixtures.gpt(2, cuda=True),
    "memory outside every module": memory_fixtures.mlp(),
    "no lines": fixtures.mlp(lines=False, overhead=None),
    "several roots": fixtures.gan(),
    "partial": fixtures.mlp(partial=True),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_round_trip_is_equal(run: RunData) -> None:
    text = to_json(run)
    assert from_json(text) == run
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize("seed", range(40))
def test_round_trip_of_random_runs(seed: int) -> None:
    run = fixtures.random_run(seed)
    assert from_json(to_json(run)) == run


def test_names_order_and_absence() -> None:
    record = json.loads(to_json(RUNS["gpt"]))
    assert list(record) == [
        *("schema_version", "gradscope", "partial", "environment", "workload", "step", "ledger"),
        *("layers", "lines", "ops", "kernels", "findings", "notes"),
    ]
    root, linear = record["layers"][0], record["layers"][9]
    assert root["class"] == "GPT"
    assert "class_name" not in root
    assert "parent" not in root  # None is left out, 0 is not
    assert "device_ns" not in root
    assert root["recompute_ns"] == 0
    assert linear["parent"] == "transformer.h.0.attn"
    assert list(record["ledger"]) == [
        *("backward_ns", "layers_ns", "recompute_ns", "gradient_sum_ns", "accumulate_ns"),
        *("outside_modules_ns", "communication_ns", "engine_ns", "unattributed_ns", "hook_ns"),
    ]
    times = [row[key] for row in record["layers"] for key in row if key.endswith("_ns") and "steps" not in key]
    assert len(times) > 900
    assert all(type(value) is int for value in times)


def test_one_row_a_line() -> None:
    lines = to_json(RUNS["gpt"]).splitlines()
    assert sum(line.startswith('  {"path": ') for line in lines) == len(RUNS["gpt"].layers)


def test_memory_has_one_row_a_line_too() -> None:
    run = RUNS["memory"]
    assert run.memory is not None
    lines = to_json(run).splitlines()
    assert sum(line.startswith('   {"owner": ') for line in lines) == len(run.memory.at_peak) - 1
    assert sum(line.startswith('   {"category": "inputs", "bytes": 1') for line in lines) == 1  # nobody's
    assert run.memory.categories and run.memory.spans
    assert sum(bool(re.match(r'   {"category": "[a-z ]+", "bytes": \[', line)) for line in lines) == len(
        run.memory.categories
    )
    assert sum(line.startswith('   {"layer": ') and '"start_ns": ' in line for line in lines) == len(run.memory.spans)
    assert sum(line.startswith('   {"ns": ') for line in lines) == len(run.memory.timeline)
    assert f'  "peak_bytes": {run.memory.peak_bytes},' in lines
    assert '  "peak_phase": "backward",' in lines


def test_what_was_not_measured_of_memory_is_absent() -> None:
    record = json.loads(to_json(RUNS["memory outside every module"]))["memory"]
    assert "reserved_bytes" not in record
    assert "owner" not in next(row for row in record["at_peak"] if row["category"] == "inputs")
    assert record["held"] == record["retained"] == []  # measured, and nothing there
    assert "line" not in record["saved"][-1]


def test_a_file_from_before_memory_still_loads() -> None:
    record = json.loads(to_json(RUNS["memory"]))
    del record["memory"]
    names = {field.name for field in dataclasses.fields(LayerRow) if "bytes" in field.name or "alloc" in field.name}
    for row in (*record["layers"], *record["lines"]):
        for name in names & set(row):
            del row[name]
    run = from_json(json.dumps(record))
    assert run.memory is None
    assert all(getattr(row, name) is None for row in run.layers for name in names)
    assert all(row.saved_bytes is row.allocated_bytes is row.copied_bytes is None for row in run.lines)


def test_a_file_from_before_hooks_had_a_part_still_loads() -> None:
    record = json.loads(to_json(RUNS["gpt"]))
    for row in (record["ledger"], *record["layers"]):
        del row["hook_ns"]
    assert from_json(json.dumps(record)) == RUNS["gpt"]


def test_numpy_numbers_are_written_as_numbers() -> None:
    run = dataclasses.replace(fixtures.mlp(), environment={"threads": np.int64(2)})
    assert json.loads(to_json(run))["environment"] == {"threads": 2}


def test_nan_is_refused_and_named() -> None:
    run = fixtures.mlp()
    layers = (*run.layers[:2], dataclasses.replace(run.layers[2], backward_share=float("nan")), *run.layers[3:])
    with pytest.raises(OutputError) as caught:
        to_json(dataclasses.replace(run, layers=layers))
    message = "run.layers[2].backward_share is not a finite number, so it cannot be written as JSON."
    assert str(caught.value) == message


def test_unknown_keys_are_ignored() -> None:
    record = json.loads(to_json(RUNS["gpt"]))
    record["later"] = 1
    record["layers"][0]["later"] = {"x": 1}
    assert from_json(json.dumps(record)) == RUNS["gpt"]


# -- what bad files get ------------------------------------------------------------------------------------------------


def changed(change: Any) -> str:
    record = json.loads(to_json(memory_fixtures.mlp()))
    change(record)
    return json.dumps(record)


def remove(*keys: Any) -> Any:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    return change


def put(value: Any, *keys: Any) -> Any:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


AGAIN = "Profile again to write a new one."
WRITE = "Write one with: gradscope profile TARGET"
BAD_FILES = {
    "not json": ("hello", f"run.json is not JSON: Expecting value (line 1, column 1).\n{WRITE}"),
    "empty": ("", f"run.json is not JSON: it is empty.\n{WRITE}"),
    "nan": ('{"schema_version": NaN}', f"run.json is not JSON: it contains NaN.\n{WRITE}"),
    "other json": (
        '{"traceEvents": []}',
        "run.json is not a RUN.json: it has no schema_version and ledger.\nWrite one with: gradscope profile TARGET",
    ),
    "a list": (
        "[]",
        "run.json is not a RUN.json: it has no schema_version and ledger.\nWrite one with: gradscope profile TARGET",
    ),
    "odd version": (
        changed(put("1", "schema_version")),
        "run.json is not a RUN.json: its schema_version is '1'.\nWrite one with: gradscope profile TARGET",
    ),
    "newer": (
        changed(put(2, "schema_version")),
        "run.json has schema_version 2; this gradscope reads up to 1.\n"
        "It was written by gradscope 0.1.0: update gradscope, or profile again.",
    ),
    "missing": (changed(remove("step", "wall_ns")), f"run.json is damaged: step.wall_ns is missing.\n{AGAIN}"),
    "missing in row": (
        changed(remove("layers", 2, "path")),
        f"run.json is damaged: layers[2].path is missing.\n{AGAIN}",
    ),
    "string": (
        changed(put("5", "layers", 1, "backward_self_ns")),
        f"run.json is damaged: layers[1].backward_self_ns is a string, not an integer.\n{AGAIN}",
    ),
    "float": (
        changed(put(1.5, "ledger", "engine_ns")),
        f"run.json is damaged: ledger.engine_ns is the number 1.5, not an integer.\n{AGAIN}",
    ),
    "bool": (
        changed(put(True, "layers", 0, "calls")),
        f"run.json is damaged: layers[0].calls is true or false, not a number.\n{AGAIN}",
    ),
    "not a list": (changed(put({}, "layers")), f"run.json is damaged: layers is an object, not a list.\n{AGAIN}"),
    "not an object": (changed(put([], "ops", 0)), f"run.json is damaged: ops[0] is a list, not an object.\n{AGAIN}"),
    "mode": (
        changed(put("x", "workload", "mode")),
        f"run.json is damaged: workload.mode is 'x', not one of model, script, loop, trace.\n{AGAIN}",
    ),
    "sums": (
        changed(put(1, "ledger", "engine_ns")),
        "run.json has numbers that do not add up: ledger parts against backward_ns: 197601 != 227800 ns.\n"
        "It was changed after it was written; profile again.",
    ),
    "memory is no object": (
        changed(put([1], "memory")),
        f"run.json is damaged: memory is a list, not an object.\n{AGAIN}",
    ),
    "no peak": (
        changed(remove("memory", "peak_bytes")),
        f"run.json is damaged: memory.peak_bytes is missing.\n{AGAIN}",
    ),
    "holder": (
        changed(put("7 MB", "memory", "at_peak", 1, "bytes")),
        f"run.json is damaged: memory.at_peak[1].bytes is a string, not an integer.\n{AGAIN}",
    ),
    "saved": (
        changed(remove("memory", "saved", 0, "node")),
        f"run.json is damaged: memory.saved[0].node is missing.\n{AGAIN}",
    ),
    "timeline": (
        changed(put(None, "memory", "timeline", 2)),
        f"run.json is damaged: memory.timeline[2] is null, not an object.\n{AGAIN}",
    ),
    "reserved": (
        changed(put(1.5, "memory", "reserved_bytes")),
        f"run.json is damaged: memory.reserved_bytes is the number 1.5, not an integer.\n{AGAIN}",
    ),
    "peak": (
        changed(put(64_341, "memory", "peak_bytes")),
        "run.json has numbers that do not add up: live set at the peak: 64340 != 64341 bytes.\n"
        "It was changed after it was written; profile again.",
    ),
    "saved of a layer": (
        changed(put(0, "layers", 2, "saved_bytes")),
        "run.json has numbers that do not add up: layers' saved_bytes: 1284 != 9476 bytes.\n"
        "It was changed after it was written; profile again.",
    ),
    "copied": (
        changed(put(8_999, "memory", "copied_bytes")),
        "run.json has numbers that do not add up: copies: 9000 != 8999 bytes.\n"
        "It was changed after it was written; profile again.",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunFileError) as caught:
        load("run.json")
    assert str(caught.value) == message


def test_no_file_and_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFileError) as missing:
        load("run.json")
    assert str(missing.value) == "run.json: no such file.\nWrite one with: gradscope profile TARGET"
    Path("run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunFileError) as binary:
        load("run.json")
    assert str(binary.value) == f"run.json cannot be read: it is not UTF-8 text (byte 0).\n{WRITE}"
    with pytest.raises(RunFileError) as folder:
        load(tmp_path)
    assert str(folder.value) == f"{tmp_path} cannot be read: it is a folder.\n{WRITE}"


# -- writing -----------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    report = Report(RUNS["cuda"])
    path = tmp_path / "run.json"
    assert report.save(path) == path
    assert load(path).data == RUNS["cuda"]
    assert load(path).path == report.path == path
    Report(RUNS["gpt"]).save(path)  # its own file may be replaced
    assert load(path).data == RUNS["gpt"]
    assert os.listdir(tmp_path) == ["run.json"]


def test_save_refuses_what_gradscope_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"accuracy": 0.91}')
    with pytest.raises(OutputError) as caught:
        Report(RUNS["gpt"]).save(path)
    assert str(caught.value) == (
        f"{path} exists and was not written by gradscope.\n"
        "Choose another path, or replace it with --force (in Python: force=True)."
    )
    assert path.read_text() == '{"accuracy": 0.91}'
    Report(RUNS["gpt"]).save(path, force=True)
    assert load(path).data == RUNS["gpt"]


def test_an_empty_file_and_a_cut_off_run_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for start in ("", to_json(RUNS["gpt"])[:500]):
        path.write_text(start, encoding="utf-8")
        Report(RUNS["gpt"]).save(path)
        assert load(path).data == RUNS["gpt"]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as folder:
        check_output(tmp_path)
    assert str(folder.value) == f"{tmp_path} is a folder.\nGive the path of a file, such as {tmp_path / 'run.json'}."
    missing = tmp_path / "nowhere" / "run.json"
    with pytest.raises(OutputError) as lost:
        check_output(missing)
    assert str(lost.value) == (
        f"{missing} cannot be written: the folder {missing.parent} does not exist.\nCreate it first."
    )


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(OutputError) as caught:
        check_output(tmp_path / "run.json")
    assert str(caught.value) == (
        f"{tmp_path / 'run.json'} cannot be written: no permission to write in {tmp_path}.\nChoose another path."
    )


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    Report(RUNS["gpt"]).save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError) as caught:
        Report(RUNS["cuda"]).save(path)
    assert str(caught.value) == f"{path} cannot be written: No space left on device.\nChoose another path."
    assert os.listdir(tmp_path) == ["run.json"]
    assert load(path).data == RUNS["gpt"]


@pytest.mark.skipif(os.name == "nt", reason="permissions and links as on POSIX")
def test_permissions_and_links_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "run.json", tmp_path / "link.json"
    Report(RUNS["gpt"]).save(path)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    link.symlink_to(path)
    Report(RUNS["cuda"]).save(link)
    assert link.is_symlink()
    assert load(path).data == RUNS["cuda"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.name == "nt", reason="needs /dev/null")
def test_a_device_is_written_to_not_replaced() -> None:
    Report(RUNS["gpt"]).save("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_the_reference_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "run-json.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", text))
    times = (RunData, WorkloadInfo, StepTimes, Spread, Ledger, LayerRow, LineRow, OpRow, KernelRow, Finding)
    for cls in (*times, MemoryInfo):
        fields = {"class" if field.name == "class_name" else field.name for field in dataclasses.fields(cls)}
        assert fields <= named, cls.__name__
    memory = text.partition("\n## `memory`")[2].partition("\n## ")[0]
    parts = dict(re.findall(r"`memory\.([a-z_]+)`(.*?)(?=`memory\.|$)", memory, re.DOTALL))
    parts["held"] = parts["retained"]  # one table for both
    for name, cls in MEMORY_TABLES.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert fields <= set(re.findall(r"`([a-z_]+)`", parts[name])), name
    assert {str(category) for category in MemoryCategory} <= set(re.findall(r"`([a-z ]+)`", parts["at_peak"]))


MEMORY_TABLES = {
    "at_peak": HolderRow,
    "saved": SavedRow,
    "held": HeldRow,
    "retained": RetainedRow,
    "copies": CopyRow,
    "timeline": TimelinePoint,
    "categories": CategoryCourse,
    "owners": OwnerCourse,
    "phases": PhaseSpan,
    "spans": LayerSpan,
}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"kind": "fix", "schema_version": 1}', "it is a FIX.json"),
        ('{"kind": "other", "schema_version": 1}', "it has no ledger"),
        ('{"kind": ["fix"], "ledger": {}}', "it has no schema_version"),
    ],
)
def test_a_file_of_another_kind_is_told_for_what_it_is(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RunFileError, match=f"is not a RUN.json: {why}\\."):
        load(path)
