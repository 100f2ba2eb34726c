"""Versions of torch and Python: which are tried, what is said of the others, and names that a torch may lack."""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gradscope
from gradscope import compat, versions
from gradscope.errors import UnsupportedTorchError
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.versions import environment, row

REPOSITORY = Path(__file__).parents[2]
PINS = REPOSITORY / "tests" / "versions"
NEWER = (
    "torch 9.1.0+cpu was not tried: gradscope is tested on torch 2.11 to 2.15; "
    "'gradscope doctor' shows what answers here"
)


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.13.0+cpu", "2.15.3+cu132", "2.15.0a0+git1234567"])
@pytest.mark.parametrize("python", ["3.11.0", "3.12.1", "3.13.0rc1"])
def test_nothing_is_said_of_what_was_tried(torch_version: str, python: str) -> None:
    assert versions.untried(torch_version, python) == []


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.100.1", "3.0.0a0+git1234567", "main"])
def test_another_torch(version: str) -> None:
    assert versions.untried(version, "3.12.1") == [NEWER.replace("9.1.0+cpu", version)]


def test_another_python() -> None:
    assert versions.untried("2.13.0", "3.14.2") == [
        "Python 3.14.2 was not tried: gradscope is tested on Python 3.11 to 3.13; "
        "'gradscope doctor' shows what answers here"
    ]


# --------------------------------------------------------------------------------------------------------------------
# Where it is said
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_report_says_it_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    report = gradscope.profile(torch.nn.Linear(4, 4), torch.ones(2, 4), steps=1, warmup=1, device="cpu")
    assert [note for note in report.data.notes if "not tried" in note] == [NEWER]
    assert "not tried" not in capfd.readouterr().err


def test_doctor_says_it(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count(f"\nwarning: {NEWER}\n") == 1
    assert json.loads(run("doctor", "--json").out)["warnings"] == [NEWER]


def test_doctor_says_nothing_of_versions_that_were_tried(run: Runner) -> None:
    assert "warning" not in run("doctor").out


# --------------------------------------------------------------------------------------------------------------------
# Private names
# --------------------------------------------------------------------------------------------------------------------

PACKAGE = Path(compat.__file__).parent
PRIVATE = [
    name
    for path in sorted(PACKAGE.glob("*.py"))
    for name in re.findall(r'private\("([^"]+)"\)', path.read_text("utf-8"))
]


def _imported_again(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``gradscope.compat`` as a process would import it that finds this torch."""
    monkeypatch.setattr(gradscope, "compat", compat)  # puts the first one back in the end
    for name in [name for name in sys.modules if f"{name}.".startswith("gradscope.compat.")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("gradscope.compat")


@pytest.mark.parametrize("name", PRIVATE)
def test_a_torch_without_a_private_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, _, last = name.rpartition(".")
    owner = torch
    for part in holder.split(".")[1:]:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    again = _imported_again(monkeypatch)
    with pytest.raises(UnsupportedTorchError) as caught:
        again.require()
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"torch {torch.__version__} does not behave as gradscope needs: ")
    assert second == "gradscope is tested on torch 2.11 to 2.15; run 'gradscope doctor' for the full list."


def test_there_are_private_names() -> None:
    assert "torch.autograd._get_sequence_nr" in PRIVATE


# --------------------------------------------------------------------------------------------------------------------
# The environment of a version
# --------------------------------------------------------------------------------------------------------------------


def test_pins_of_a_version_replace_those_of_the_others() -> None:
    pins = dict(pin.split("==") for pin in environment.pins("2.11.0"))
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    common = dict(line.split("==") for line in text.splitlines() if "==" in line)
    assert (pins["torch"], pins["triton"]) == ("2.11.0", "3.6.0")
    changed = {name for name in common if pins.get(name) != common[name]}
    assert changed == {"torch", "triton", "numpy", "ruff", "mypy", "pandas-stubs"}
    assert set(pins) <= set(common)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: environment.py VERSION\nVERSION is one of 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0"),
        (
            ["2.10.0"],
            "no pins for torch 2.10.0: there are some for 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0\n"
            "For another version write tests/versions/torch-2.10.0.txt with its torch and triton.",
        ),
    ],
    ids=["none", "unknown"],
)
def test_a_version_without_pins(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tests/versions/environment.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        environment.main()
    assert caught.value.code == message


def test_a_row_adds_up_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    (tmp_path / "a.xml").write_text(suite.format(2000, 1, 2, 5))
    (tmp_path / "b.xml").write_text(suite.format(10, 1, 0, 0))
    monkeypatch.setattr(sys, "argv", ["row.py", str(tmp_path / "a.xml"), str(tmp_path / "b.xml")])
    row.main()
    cells = [cell.strip() for cell in capsys.readouterr().out.strip().strip("|").split("|")]
    assert cells[3:7] == [platform.python_version(), "2,001", "4", "5"]


# --------------------------------------------------------------------------------------------------------------------
# One range, wherever it stands
# --------------------------------------------------------------------------------------------------------------------


def _released(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_pins_reach_from_the_oldest_to_the_newest() -> None:
    pinned = [path.stem.removeprefix("torch-") for path in PINS.glob("torch-*.txt")]
    for version in pinned:
        assert f"\ntorch=={version}\n" in "\n" + (PINS / f"torch-{version}.txt").read_text(encoding="utf-8")
    released = sorted((_released(version) for version in pinned), key=lambda version: int(version.split(".")[1]))
    assert (released[0], released[-1]) == versions.TORCH


def test_the_package_asks_for_the_oldest_and_no_less() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={versions.TORCH[0]}" in project["dependencies"]
    assert project["requires-python"] == f">={versions.PYTHON[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/versions.md"])
def test_pages_name_the_range(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for name, (oldest, newest) in (("torch", versions.TORCH), ("Python", versions.PYTHON)):
        assert f"{name} {oldest} to {newest}" in text
