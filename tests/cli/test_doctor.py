"""What ``gradscope doctor`` says of the machine's limits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from gradscope.cli import doctor
from gradscope.devices import device_name
from gradscope.limits import keep, kept, measure
from gradscope.tables import Limits
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the file of limits that would be in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gradscope" / "limits.json"


def fake(device: torch.device, step: object = None) -> Limits:
    return Limits(device_name(device), {"float32": 1e11, "bfloat16": 3e11}, 2e10, 900.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing, on a machine that does nothing else."""
    monkeypatch.setattr(measure, "measure", fake)
    monkeypatch.setattr(doctor, "_load", lambda: 0.0)


def test_the_doctor_says_how_to_get_them(run: Runner) -> None:
    out = run("doctor").out
    name = device_name(torch.device("cpu"))
    assert "\nthis machine's limits\n" in out
    assert f"  not measured on {name} with this torch and thread count: run gradscope doctor --calibrate\n" in out


def test_the_doctor_measures_keeps_and_shows(run: Runner, quick: None, cache: Path) -> None:
    ran = run("doctor", "--calibrate")
    assert ran.code == 0
    assert ran.err.startswith("gradscope: measuring the limits of cpu: keep the machine idle\n")
    threads = torch.get_num_threads()
    name = device_name(torch.device("cpu"))
    text = (
        f"\nthis machine's limits\n  {name}, {threads} thread{'s' if threads > 1 else ''}  measured just now\n"
        "    float32 matmul    100 GFLOP/s\n"
        "    bfloat16 matmul   300 GFLOP/s\n"
        "    memory bandwidth  20.0 GB/s\n"
        "    smallest call     900 ns\n"
    )
    assert text in ran.out
    assert "not measured" not in ran.out
    assert kept(name, threads) is not None
    again = run("doctor")
    assert again.err == ""
    assert text in again.out


def test_the_doctor_says_how_old_they_are(run: Runner) -> None:
    keep(fake(torch.device("cpu")), torch.get_num_threads(), now=time.time() - 3 * 86_400 - 60)
    assert "  measured 3 days ago\n" in run("doctor").out


def test_the_doctor_on_a_broken_file(run: Runner, quick: None, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    out = run("doctor").out
    assert f"  no   {cache} cannot be read: it is not JSON\n" in out
    assert "gradscope doctor --calibrate" in out
    ran = run("doctor", "--calibrate")
    assert "gradscope: the stored limits cannot be read: it is not JSON; measuring them again\n" in ran.err
    assert "cannot be read" not in ran.out


def test_the_doctor_on_a_busy_machine(run: Runner, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_load", lambda: 3.14)
    assert run("doctor", "--calibrate").err.startswith(
        "gradscope: this machine is busy (load 3.1): the limits may come out too low; calibrate again when it is idle\n"
    )


def test_the_doctor_where_they_cannot_be_kept(run: Runner, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def never(*_: object) -> Limits:
        raise AssertionError("measured for nothing")

    monkeypatch.setattr(measure, "measure", never)
    cache.parent.parent.write_text("a file")
    ran = run("doctor", "--calibrate")
    assert ran.code == 2
    assert ran.err.startswith(f"gradscope: error: {cache} cannot be written: ")


def test_the_doctor_as_json(run: Runner, quick: None, cache: Path) -> None:
    record = json.loads(run("doctor", "--json", "--calibrate").out)["limits"]
    assert (record["file"], record["problem"], record["missing"]) == (str(cache), "", [])
    assert record["kept"][0]["limits"]["flops"] == {"float32": 1e11, "bfloat16": 3e11}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 minute ago"),
        (7200, "2 hours ago"),
        (86_400, "1 day ago"),
        (4e6, "46 days ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert doctor.age(seconds) == text


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("missing", ["set_eval_frame", "_maybe_set_eval_frame", "_TorchDynamoContext"])
def test_the_doctor_names_what_this_torchs_compiler_lacks(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.eval_frame as frames

    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/g++")
    assert doctor._compile(torch).ok
    monkeypatch.delattr(frames, missing)
    answer = doctor._compile(torch)
    assert not answer.ok and missing in answer.detail
