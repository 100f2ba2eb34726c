"""A fit as it is read: the terminal's text word for word, the DataFrames, FIT.json."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradscope.document.terminal import to_text
from gradscope.errors import OutputError
from gradscope.fitting import FitReport
from gradscope.fitting.document import fit_document
from gradscope.fitting.result import FitData, FitRow, LayerGrowth, MeasuredRow
from gradscope.report.outfile import RUN_HEAD

MB = 10**6


def layers() -> tuple[LayerGrowth, ...]:
    found = [LayerGrowth("", "Net", None, 0, 0, 9 * MB), LayerGrowth("h", "ModuleList", "", 0, 0, 8 * MB)]
    for block in (f"h.{k}" for k in range(2)):
        found.append(LayerGrowth(block, "Block", "h", 0, MB, 4 * MB))
        found.append(LayerGrowth(f"{block}.fc", "Linear", block, 10, 3 * MB, 3 * MB))
    return (*found, LayerGrowth("head", "Linear", "", 5, MB, MB))


def shown(data: FitData, width: int = 100, encoding: str = "utf-8") -> str:
    return to_text(fit_document(data), width, encoding)


def fitted(**changes: Any) -> FitData:
    rows = (
        FitRow(8, 130 * MB, 80 * MB, 40 * MB, 10 * MB, "agrees", fits="yes"),
        FitRow(64, 700 * MB, 640 * MB, 40 * MB, 20 * MB, "corrected", correction_bytes=64 * MB, fits="no"),
    )
    measured = (
        MeasuredRow(2, 70 * MB, 70 * MB, "prediction"),
        MeasuredRow(3, 80 * MB, 80 * MB, "prediction"),
        MeasuredRow(4, 90 * MB, 90 * MB, "prediction"),
        MeasuredRow(8, 129 * MB, 130 * MB, "check"),
    )
    data = FitData(
        gradscope="0.1.0",
        target="net.py",
        environment={"device": "cpu", "device_name": "Some CPU", "torch": "2.13.0", "python": "3.11.7"},
        model="Net",
        parameters=25,
        optimizer="AdamW",
        measured=measured,
        deviation=1 / 129,
        unmatched_bytes=0,
        rows=rows,
        layers=layers(),
        outside_bytes_per_sample=MB,
        growth_at=64,
        device_memory_bytes=500 * MB,
        device_memory="500MB",
        reserve_bytes=50 * MB,
        reserve="10 %",
        largest=40,
        largest_peak_bytes=449 * MB,
    )
    return dataclasses.replace(data, **changes)


TEXT = """\
gradscope 0.1.0
target     net.py
model      Net, 25 parameters
optimizer  AdamW
device     cpu (Some CPU) · torch 2.13.0 · python 3.11.7
measured   batch sizes 2, 3, 4 · checked at 8: 130 MB predicted, 129 MB measured, +0.8 %
memory     500MB · less 10 % in reserve · 450 MB for the tensors of a step

Peak memory  predicted for one step: saved + model, gradients, optimizer + rest
batch size    peak  fits    saved    model     rest  fake tensors
         8  130 MB  yes   80.0 MB  40.0 MB  10.0 MB  agrees
        64  700 MB  no     640 MB  40.0 MB  20.0 MB  corrected, +64.0 MB
The largest batch size that fits is 40, with a peak of 449 MB.

What grows  saved for backward by the last sample of 64: 10.0 MB
layer               class   a sample   share                        layers
h.*.fc              Linear   6.00 MB  60.0 %  ████████████               2
h.*                 Block    2.00 MB  20.0 %  ████                       2
head                Linear   1.00 MB  10.0 %  ██                         1
outside the layers           1.00 MB  10.0 %  ██
"""


def test_the_report() -> None:
    assert shown(fitted()).partition("\n\nNotes")[0] + "\n" == TEXT


def notes(**changes: Any) -> list[str]:
    text = shown(fitted(**changes), width=2000)
    found = text.partition("\nNotes  what was not measured or is an estimate, and why\n")[2]
    return [line.removeprefix("- ") for line in found.splitlines()]


CORRECTED = (
    "at batch size 64 the model keeps 64.0 MB more for backward than the small sizes lead to expect: it does something "
    "else there. Its figures are corrected by that, and its temporaries are not known"
)
ON_CPU = (
    "measured on the CPU, this is what the tensors of a step need. On a CUDA device its context (0.3 to 0.6 GiB), the "
    "allocator's rounding (512 bytes a tensor, 2 MiB a segment) and fragmentation come on top, and kernels may want "
    "other workspaces: that is what --reserve is for"
)


def test_notes() -> None:
    assert notes() == [CORRECTED, ON_CPU]
    assert notes(rows=fitted().rows[:1], device_memory_bytes=None) == []
    cuda = {"device": "cuda", "device_name": "Some GPU"}
    assert notes(rows=fitted().rows[:1], environment=cuda) == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"deviation": None}, "the prediction was not checked against a measured batch size"),
        (
            {"deviation": -0.12},
            "memory does not grow smoothly with the batch size: at the check the prediction is -12.0 % off. The table "
            "gives the range of what any three of the measured sizes predict; --measure with larger sizes narrows it",
        ),
        (
            {"unmatched_bytes": 13 * MB},
            "13.0 MB (10.0 %) of the peak at batch size 8 is a trend only: blocks that not every measured size has, or "
            "whose sizes follow no curve",
        ),
        (
            {"unchecked": "the model reads a tensor value"},
            "no size was checked with fake tensors: the model reads a tensor value",
        ),
        ({"notes": ("the batch is a list",)}, "the batch is a list"),
        (
            {"optimizer": None, "adam_bytes": 200, "gradient_bytes": 100},
            "gradients kept during forward (gradient accumulation, zero_grad(set_to_none=False)) would add 100 B",
        ),
    ],
)
def test_each_note(changes: dict[str, Any], note: str) -> None:
    assert notes(rows=fitted().rows[:1], device_memory_bytes=None, **changes) == [note]


def line(name: str, **changes: Any) -> str:
    return next(line for line in shown(fitted(**changes), width=2000).splitlines() if line.startswith(name))


def test_header_of_a_workload_without_an_optimizer() -> None:
    assert line("optimizer", optimizer=None, adam_bytes=200) == (
        "optimizer  none, so no optimizer state is included; Adam's would add 200 B (2 x parameters) · "
        "add it with --optimizer adam, adamw or sgd"
    )


def test_header_without_a_check() -> None:
    measured = fitted().measured[:3]
    assert line("measured", measured=measured, deviation=None) == "measured   batch sizes 2, 3, 4 · not checked"


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"largest": None, "smallest_peak_bytes": 600 * MB}, "Not even batch size 1 fits: it needs 600 MB."),
        ({"largest": 2**20, "unlimited": True}, "Every batch size up to 1,048,576 fits; the search ended there."),
    ],
)
def test_other_answers(changes: dict[str, Any], answer: str) -> None:
    assert answer in shown(fitted(**changes)).splitlines()


def test_without_device_memory_only_peaks() -> None:
    rows = tuple(dataclasses.replace(row, fits=None) for row in fitted().rows)
    changes = {"device_memory_bytes": None, "reserve_bytes": None, "largest": None}
    text = shown(fitted(rows=rows, **changes))
    assert "fits" not in text
    assert not re.search(r"^memory", text, re.MULTILINE)
    assert re.search(r"^ +8  130 MB  80\.0 MB  40\.0 MB", text, re.MULTILINE)


def test_a_range() -> None:
    row = dataclasses.replace(fitted().rows[0], low_bytes=120 * MB, high_bytes=460 * MB, fits="unsure")
    text = shown(fitted(rows=(row,)))
    assert re.search(r"^ +8  130 MB  120 MB to 460 MB  unsure", text, re.MULTILINE)


def test_more_layers_than_are_shown() -> None:
    many = tuple(LayerGrowth(f"l{chr(97 + k)}", "Linear", "", 1, MB, MB) for k in range(12))
    text = to_text(
        fit_document(fitted(layers=(LayerGrowth("", "Net", None, 0, 0, 12 * MB), *many), outside_bytes_per_sample=0))
    )
    assert re.search(r"^… 2 more +2\.00 MB  16\.7 %", text, re.MULTILINE)


def test_nothing_grows() -> None:
    assert "What grows" not in shown(fitted(layers=(), outside_bytes_per_sample=0))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    changed = {"deviation": 0.2, "unmatched_bytes": 100 * MB, "optimizer": None, "adam_bytes": 1, "gradient_bytes": 1}
    assert max(len(line) for line in shown(fitted(**changed), width=width).splitlines()) <= width


def test_plain_ascii() -> None:
    shown(fitted(), encoding="ascii").encode("ascii")


# --------------------------------------------------------------------------------------------------------------------
# The object
# --------------------------------------------------------------------------------------------------------------------


def test_print() -> None:
    report = FitReport(fitted())
    console = Console(width=100, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print(console)
    console.file.close()
    assert console.export_text().splitlines() == str(report).splitlines()
    assert repr(report) == "<gradscope.FitReport of 'net.py': batch sizes 8, 64; largest 40>"


def test_tables() -> None:
    report = FitReport(fitted())
    assert report.table["batch_size"].tolist() == [8, 64]
    assert report.table["peak_bytes"].sum() == 830 * MB
    assert report.table["low_bytes"].isna().all()
    assert report.table["fits"].tolist() == ["yes", "no"]
    assert list(report.layers.columns) == [
        "path",
        "class",
        "parent",
        "parameters",
        "saved_bytes_per_sample",
        "saved_total_bytes_per_sample",
    ]
    assert report.largest == 40


def test_json(tmp_path: Any) -> None:
    report = FitReport(fitted())
    assert RUN_HEAD.match(report.to_json())
    record = json.loads(report.to_json())
    assert list(record)[:3] == ["schema_version", "gradscope", "target"]
    assert record["rows"][0] == {
        "batch_size": 8,
        "peak_bytes": 130 * MB,
        "saved_bytes": 80 * MB,
        "model_bytes": 40 * MB,
        "rest_bytes": 10 * MB,
        "check": "agrees",
        "correction_bytes": 0,
        "fits": "yes",
    }
    assert record["layers"][1]["class"] == "ModuleList"
    assert "adam_bytes" not in record
    path = report.save(tmp_path / "fit.json")
    assert report.save(path) == path
    path.write_text("mine")
    with pytest.raises(OutputError):
        report.save(path)


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
    fields = [field.name for kind in (FitData, FitRow, MeasuredRow, LayerGrowth) for field in dataclasses.fields(kind)]
    assert [name for name in fields if f"`{name.replace('class_name', 'class')}`" not in text] == []
