"""``gradscope show`` and ``gradscope doctor``."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from gradscope import compat
from gradscope.cli import doctor as doctor_module
from gradscope.cli.doctor import diagnose
from gradscope.compat import Check
from gradscope.report import Report, load
from tests import report_fixtures as fixtures
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The run that lies in run.json."""
    monkeypatch.chdir(tmp_path)
    report = Report(fixtures.gpt())
    report.save("run.json")
    return load("run.json")


def test_terminal_is_the_default(saved: Report, run: Runner) -> None:
    ran = run("show", "run.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == run("show", "run.json", "--format", "terminal").out
    assert ran.out.startswith("gradscope ")
    assert "\x1b[" not in ran.out
    assert "\x1b[" in run("show", "run.json", "--color", "always").out


def test_a_choice_of_layers(saved: Report, run: Runner) -> None:
    full = run("show", "run.json", "--min-percent", "0").out
    assert len(run("show", "run.json", "--depth", "1", "--min-percent", "0").out.splitlines()) < len(full.splitlines())
    assert run("show", "run.json", "--top", "1").out != run("show", "run.json").out
    assert run("show", "run.json", "--sort", "forward").out != run("show", "run.json").out


def test_exports(saved: Report, run: Runner) -> None:
    assert run("show", "run.json", "--format", "json").out == Path("run.json").read_text()
    assert run("show", "run.json", "--format", "markdown", "--depth", "1").out == saved.to_markdown(depth=1)
    assert run("show", "run.json", "--format", "speedscope").out == saved.to_speedscope()


@pytest.mark.parametrize("table", ["layers", "lines", "ops", "kernels", "findings", "ledger"])
def test_csv(table: str, saved: Report, run: Runner) -> None:
    ran = run("show", "run.json", "--format", "csv", "--table", table)
    rows = list(csv.reader(io.StringIO(ran.out)))
    assert len(rows) == 1 + len(saved.ledger if table == "ledger" else getattr(saved.data, table))
    if table == "layers":
        assert ran.out == run("show", "run.json", "--format", "csv").out


@pytest.mark.parametrize("form", ["terminal", "json", "csv", "markdown", "speedscope"])
def test_into_a_file(form: str, saved: Report, run: Runner) -> None:
    ran = run("show", "run.json", "--format", form, "-o", "out.txt")
    assert (ran.code, ran.out, ran.err) == (0, "", "gradscope: wrote out.txt\n")
    text = Path("out.txt").read_text()
    assert text
    if form in {"json", "speedscope"}:  # known as ours by how it begins
        assert run("show", "run.json", "--format", form, "-o", "out.txt").code == 0
    else:
        assert run("show", "run.json", "--format", form, "-o", "out.txt").err == (
            "gradscope: error: out.txt exists and was not written by gradscope.\n"
            "Choose another path, or replace it with --force (in Python: force=True).\n"
        )
        assert run("show", "run.json", "--format", form, "-o", "out.txt", "--force").code == 0
    assert Path("out.txt").read_text() == text


def test_somebody_elses_json_is_kept(saved: Report, run: Runner) -> None:
    Path("mine.json").write_text("{}")
    for form in ("json", "speedscope"):
        assert run("show", "run.json", "--format", form, "-o", "mine.json").code == 2
    assert Path("mine.json").read_text() == "{}"


def test_not_a_run(saved: Report, run: Runner) -> None:
    Path("run.json").write_text("{}")
    ran = run("show", "run.json")
    assert ran.code == 2
    assert ran.err.startswith("gradscope: error: run.json")
    assert "Traceback" not in ran.err


# --------------------------------------------------------------------------------------------------------------------
# doctor
# --------------------------------------------------------------------------------------------------------------------


def test_doctor_on_this_machine(run: Runner) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert ran.err == ""
    for text in ("torch", "python", "cpu: ", "backward time by layer", "CUDA kernel time by layer"):
        assert text in ran.out


def test_doctor_as_json(run: Runner) -> None:
    import torch

    record = json.loads(run("doctor", "--json").out)
    assert record["ok"] is True
    assert record["versions"]["torch"] == torch.__version__
    assert [item["name"] for item in record["interfaces"]] == [item.name for item in compat.check()]
    answers = {item["name"]: item["ok"] for item in record["measurements"]}
    assert answers["backward time by layer"] is True
    assert answers["CUDA kernel time by layer"] is torch.cuda.is_available()


def test_doctor_where_an_interface_changed(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (Check("sequence numbers", True, "as ever"), Check("profiler events", False, "AttributeError: gone"))
    monkeypatch.setattr(compat, "check", lambda: checks)
    ran = run("doctor")
    assert ran.code == 2
    assert "  no   profiler events   AttributeError: gone\n" in ran.out
    assert "  no   backward time by layer        a torch interface listed above does not work as needed\n" in ran.out


def test_doctor_without_torch(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = run("doctor")
    assert ran.code == 2
    assert "import torch  ModuleNotFoundError: import of torch halted" in ran.out


def test_doctor_where_cupti_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    activity = torch.profiler.ProfilerActivity
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU})
    finding = next(item for item in diagnose().measurements if item.name.startswith("CUDA"))
    assert (finding.ok, finding.detail) == (False, "this torch is built without CUPTI, which reports kernels")
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU, activity.CUDA})
    monkeypatch.setattr(doctor_module, "_count_kernels", lambda torch: 0)
    finding = next(item for item in diagnose().measurements if item.name.startswith("CUDA"))
    assert not finding.ok
    assert finding.detail.startswith("CUPTI reports no kernels")
    monkeypatch.setattr(doctor_module, "_count_kernels", lambda torch: 3)
    finding = next(item for item in diagnose().measurements if item.name.startswith("CUDA"))
    assert finding.ok
