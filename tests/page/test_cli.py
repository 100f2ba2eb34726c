"""The page from the command line: profile, show, and where it is written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gradscope.cli import streams as cli_page
from gradscope.report import Report
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.page import runs

MODEL = """
import torch
def workload():
    return torch.nn.Linear(4, 4), torch.randn(2, 4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Report(runs.gpt()).save("run.json")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_show_writes_the_page_beside_the_run(folder: Path, run: Runner) -> None:
    ran = run("show", "run.json", "--format", "html")
    assert (ran.code, ran.out, ran.err) == (0, "", "gradscope: wrote run.html\n")
    assert "F.softmax(att, dim=-1)" in Path("run.html").read_text(encoding="utf-8")
    ran = run("show", "run.json", "--format", "html", "--no-source", "-o", "page.html")
    assert ran.err == "gradscope: wrote page.html\n"
    assert "F.softmax(att, dim=-1)" not in Path("page.html").read_text(encoding="utf-8")


def test_show_refuses_what_makes_no_sense(folder: Path, run: Runner) -> None:
    ran = run("show", "run.json", "--open")
    assert (ran.code, ran.err) == (2, "gradscope: error: --open is for --format html, not for terminal.\n")
    ran = run("show", "run.json", "--format", "json", "--no-source")
    assert (ran.code, ran.err) == (2, "gradscope: error: --no-source is for --format html, not for json.\n")
    Path("run.html").write_text("mine")
    ran = run("show", "run.json", "--format", "html")
    assert ran.code == 2 and "run.html exists and was not written by gradscope." in ran.err
    assert Path("run.html").read_text() == "mine"


QUICK = ("profile", "model.py", "--steps", "1", "--warmup", "0", "--no-memory", "--no-lines")


def test_profile_writes_the_page(folder: Path, run: Runner) -> None:
    ran = run(*QUICK)
    assert ran.code == 0
    assert ran.err.endswith("gradscope: wrote gradscope-model.json\ngradscope: wrote gradscope-model.html\n")
    assert (
        Path("gradscope-model.html").read_text(encoding="utf-8").startswith("<!doctype html>\n<!-- gradscope report ")
    )
    assert run(*QUICK, "-o", "here", "--no-html", "-q").err == ""
    assert Path("here.json").exists() and not Path("here.html").exists()
    assert run(*QUICK, "--html", "there.html", "-q").code == 0
    assert Path("there.html").exists()


def test_nothing_runs_if_the_page_cannot_be_written(folder: Path, run: Runner) -> None:
    Path("gradscope-model.html").write_text("mine")
    ran = run(*QUICK)
    assert ran.code == 2 and "gradscope-model.html exists and was not written by gradscope." in ran.err
    assert not Path("gradscope-model.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--html", "a.html", "--no-html"), "--html and --no-html contradict each other: give one of them."),
        (("--html", "-"), "--html writes a file: give its path, or write the page later with gradscope show."),
        (("--no-html", "--open"), "--open has no page to open: leave out --no-html, or give --html PATH."),
        (("--json", "-", "--open"), "--open has no page to open: leave out --no-html, or give --html PATH."),
    ],
)
def test_options_that_contradict(folder: Path, run: Runner, options: tuple[str, ...], message: str) -> None:
    ran = run(*QUICK, *options)
    assert (ran.code, ran.err) == (2, f"gradscope: error: {message}\n")


def test_open_asks_the_browser(folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli_page.webbrowser, "open", lambda url: not asked.append(url))
    run("show", "run.json", "--format", "html", "--open")
    assert asked == [(folder / "run.html").as_uri()]
    monkeypatch.setattr(cli_page.webbrowser, "open", lambda url: False)
    ran = run("show", "run.json", "--format", "html", "--open")
    assert ran.err.endswith("gradscope: no browser could be started: open run.html yourself\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    path = tmp_path / "a b.html"
    assert cli_page.link(path, _Terminal()) == f"\x1b]8;;{path.as_uri()}\x1b\\{path}\x1b]8;;\x1b\\"
    assert cli_page.link(path, io.StringIO()) == str(path)
    monkeypatch.setenv("TERM", "dumb")
    assert cli_page.link(path, _Terminal()) == str(path)
