"""``gradscope diff``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.compare import diff
from gradscope.report import Report
from gradscope.report.page import HTML_HEAD
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.diff_fixtures import MS, around, run

NOTHING = (0, 0, 0, 0, 0)


@pytest.fixture(name="files", autouse=True)
def files_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in a.json and b.json."""
    monkeypatch.chdir(tmp_path)
    Report(run({"": NOTHING, "a": around(10 * MS, MS), "b": around(MS, 0)})).save("a.json")
    Report(run({"": NOTHING, "a": around(20 * MS, MS), "b": around(MS, 0)})).save("b.json")


def test_terminal_is_the_default(run: Runner) -> None:
    ran = run("diff", "a.json", "b.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == str(diff("a.json", "b.json"))
    assert "before    a.json · net.py · 5 steps of 11.0 ms ±0.0 %\n" in ran.out
    assert "\x1b[" not in ran.out
    assert "\x1b[" in run("diff", "a.json", "b.json", "--color", "always").out


def test_other_formats(run: Runner) -> None:
    assert run("diff", "a.json", "b.json", "--format", "json").out == diff("a.json", "b.json").to_json()
    found = run("diff", "a.json", "b.json", "--format", "markdown", "--sort", "ratio", "--top", "1")
    assert found.out == diff("a.json", "b.json").to_markdown(sort="ratio", top=1)


@pytest.mark.parametrize("form", ["terminal", "json", "markdown"])
def test_into_a_file(form: str, run: Runner) -> None:
    ran = run("diff", "a.json", "b.json", "--format", form, "-o", "out.txt")
    assert (ran.code, ran.out, ran.err) == (0, "", "gradscope: wrote out.txt\n")
    text = Path("out.txt").read_text()
    again = run("diff", "a.json", "b.json", "--format", form, "-o", "out.txt")
    assert again.code == (0 if form == "json" else 2)  # known as ours by how it begins
    assert run("diff", "a.json", "b.json", "--format", form, "-o", "out.txt", "--force").code == 0
    assert Path("out.txt").read_text() == text


def test_a_run_is_not_replaced_by_a_comparison(run: Runner) -> None:
    before = Path("a.json").read_text()
    ran = run("diff", "a.json", "b.json", "--format", "json", "-o", "a.json")
    assert ran.code == 2
    assert ran.err == (
        "gradscope: error: a.json exists and was not written by gradscope.\n"
        "Choose another path, or replace it with --force (in Python: force=True).\n"
    )
    assert Path("a.json").read_text() == before


@pytest.mark.parametrize(
    ("option", "name"), [(["--sort", "ratio"], "sort"), (["--top", "3"], "top"), (["--all"], "all")]
)
def test_json_holds_every_layer(option: list[str], name: str, run: Runner) -> None:
    ran = run("diff", "a.json", "b.json", "--format", "json", *option)
    assert ran.code == 2
    assert ran.err == (f"gradscope: error: --{name} is for what is read by people: json always holds every layer.\n")


def test_what_is_no_run(run: Runner) -> None:
    ran = run("diff", "a.json", "none.json")
    assert ran.code == 2
    assert ran.err == "gradscope: error: none.json: no such file.\nWrite one with: gradscope profile TARGET\n"
    run("diff", "a.json", "b.json", "--format", "json", "-o", "diff.json")
    ran = run("diff", "a.json", "diff.json")
    assert ran.code == 2
    assert ran.err.startswith("gradscope: error: diff.json is not a RUN.json: it is a DIFF.json.\n")
    assert run("diff", "a.json").code == 2


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"'{sys.executable}' -m gradscope diff a.json b.json | head -n 1"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "gradscope 0.1.0  comparison\n", "")


def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom gradscope.cli import main\n"
        "try: main(['diff', 'a.json', 'b.json'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("\nFalse\n")


def test_json_is_plain(run: Runner) -> None:
    record = json.loads(run("diff", "a.json", "b.json", "-f", "json").out)
    assert [record["before"]["file"], record["after"]["file"]] == ["a.json", "b.json"]


def test_the_page_beside_the_terminal(run: Runner) -> None:
    ran = run("diff", "a.json", "b.json", "--html", "out.html")
    assert (ran.code, ran.err) == (0, "gradscope: wrote out.html\n")
    assert ran.out == str(diff("a.json", "b.json"))
    text = Path("out.html").read_text(encoding="utf-8")
    assert HTML_HEAD.match(text) and '"comparison":{"names":["a.json","b.json"]' in text
    assert run("diff", "a.json", "b.json", "--html", "out.html", "--no-source").code == 0  # ours: replaced


def test_the_page_alone(run: Runner) -> None:
    ran = run("diff", "a.json", "b.json", "--format", "html", "-o", "out.html")
    assert (ran.code, ran.out, ran.err) == (0, "", "gradscope: wrote out.html\n")
    assert HTML_HEAD.match(Path("out.html").read_text(encoding="utf-8"))


def test_the_page_does_not_replace_a_file_of_somebody_else(run: Runner) -> None:
    Path("out.html").write_text("mine")
    ran = run("diff", "a.json", "b.json", "--html", "out.html")
    assert ran.code == 2 and "out.html exists and was not written by gradscope." in ran.err
    assert (ran.out, Path("out.html").read_text()) == ("", "mine")
    assert run("diff", "a.json", "b.json", "--html", "out.html", "--force").code == 0
    assert Path("out.html").read_text() != "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--open",), "--open is for a page: add --html OUT.html."),
        (("--no-source",), "--no-source is for a page: add --html OUT.html."),
        (("--format", "html"), "--format html needs a place for the page: add -o OUT.html."),
        (
            ("--format", "html", "-o", "a.html", "--html", "b.html"),
            "-o and --html both say where the page goes: leave one out.",
        ),
        (
            ("--format", "html", "-o", "a.html", "--top", "3"),
            "--top is for what is read by people: html always holds every layer.",
        ),
    ],
)
def test_what_makes_no_sense_for_a_page(options: tuple[str, ...], message: str, run: Runner) -> None:
    ran = run("diff", "a.json", "b.json", *options)
    assert (ran.code, ran.out, ran.err) == (2, "", f"gradscope: error: {message}\n")


def test_open_starts_a_browser(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    ran = run("diff", "a.json", "b.json", "--html", "out.html", "--open")
    assert opened == [Path("out.html").resolve().as_uri()]
    assert ran.err.endswith("gradscope: no browser could be started: open out.html yourself\n")
