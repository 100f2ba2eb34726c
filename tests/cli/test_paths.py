"""One file has one name in all that a command says: from the working folder, where it is below that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradscope.cli.options import shown_target
from gradscope.safe_text import local_path
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)

MODEL = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).softmax(-1) @ x


def workload():
    return Net(), torch.randn(64, 64)
"""


@pytest.fixture(name="folder", autouse=True)
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """zoo/net.py, below the working folder."""
    (tmp_path / "work" / "zoo").mkdir(parents=True)
    (tmp_path / "work" / "zoo" / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    sys.modules.pop("net", None)


def test_a_profile_and_a_check_of_it(folder: Path, run: Runner) -> None:
    target, out = f"{folder}/../work/zoo/net.py", f"{folder}/run"
    ran = run("profile", target, "-o", out, "--steps", "2", "--warmup", "0", "--no-memory")
    assert ran.code == 0, ran.err
    said = ran.out + ran.err
    assert str(folder.parent) not in said and "zoo/net.py:11" in said
    assert (
        "gradscope 0.1.0  zoo/net.py · " in ran.out and "wrote run.json\n" in ran.err and "wrote run.html\n" in ran.err
    )
    assert json.loads(Path("run.json").read_text())["workload"]["target"] == "zoo/net.py"
    checked = run("check", f"{out}.json", "--baseline", f"{out}.json", "--max-regression", "500%")
    assert checked.out.splitlines()[1:3] == ["baseline  run.json", "run       run.json"]
    peak = run("check", f"{out}.json", "--max-peak", "1GiB")
    assert peak.err.startswith("gradscope: error: run.json has no memory to check")


def test_a_fix(folder: Path, run: Runner) -> None:
    ran = run("fix", f"{folder}/zoo/net.py", "--dry-run")
    assert ran.code == 0 and str(folder) not in ran.out + ran.err
    assert "target  zoo/net.py\n" in ran.out


def test_settings(folder: Path, run: Runner) -> None:
    Path("pyproject.toml").write_text("[tool.gradscope]\nodd = 1\n")
    assert run("check", "run.json").err.startswith("gradscope: error: pyproject.toml: tool.gradscope has no key odd.")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.json", "a.json"),
        ("./zoo/a.json", "zoo/a.json"),
        ("{here}/a.json", "a.json"),
        ("{here}/../work/zoo/../a.json", "a.json"),
        ("../a.json", "../a.json"),
        ("/nowhere/a.json", "/nowhere/a.json"),
        ("", ""),
        ("..", ".."),
        ("a\0b", "a\0b"),
    ],
)
def test_local_paths(path: str, expected: str, folder: Path) -> None:
    assert local_path(path.format(here=folder)) == expected


def test_a_target_elsewhere_is_named_as_its_source_lines_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("zoo")
    assert shown_target("net.py:workload") == "net.py:workload"
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    assert shown_target("../net.py:workload") == f"{folder}/zoo/net.py:workload"
    assert shown_target("zoo.net:workload") == "zoo.net:workload"
    assert shown_target("../net.py", module=True) == "../net.py"
