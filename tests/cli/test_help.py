"""What ``--help`` of every command shows: all of its text, whatever characters stand in it."""

from __future__ import annotations

import re

import pytest
import typer

from gradscope.cli.app import app
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)

_WRITTEN = typer.main.get_command(app)  # as the commands have it; the program shows its own copy
_COMMANDS = {"": _WRITTEN, **getattr(_WRITTEN, "commands", {})}


def _bare(text: str) -> str:
    """Without blanks, line ends and the boxes that typer draws."""
    return re.sub(r"[\s\u2500-\u257f]", "", text)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_every_text_is_shown_whole(name: str, run: Runner) -> None:
    """Rich takes [tool.gradscope.check] for a style, :warning: for a picture, and shows neither."""
    ran = run(*name.split(), "--help")
    assert ran.code == 0
    shown = _bare(ran.out)
    texts = [_COMMANDS[name].help or "", *(getattr(one, "help", None) or "" for one in _COMMANDS[name].params)]
    assert any(texts)
    for text in texts:
        assert _bare(text) in shown, text


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("check", "gradscope check [OPTIONS] RUN.json"),
        ("diff", "gradscope diff [OPTIONS] BEFORE.json AFTER.json"),
        ("fit", "gradscope fit [OPTIONS] TARGET [-- ARGS]..."),
        ("fix", "gradscope fix [OPTIONS] TARGET [-- ARGS]..."),
        ("profile", "gradscope profile [OPTIONS] TARGET [-- ARGS]..."),
        ("recipes", "gradscope recipes [OPTIONS] [NAME]"),
        ("rules", "gradscope rules [OPTIONS] [NAME]"),
        ("show", "gradscope show [OPTIONS] RUN.json"),
        ("doctor", "gradscope doctor [OPTIONS]"),
    ],
)
def test_the_usage_line_names_arguments_as_they_are(name: str, usage: str, run: Runner) -> None:
    assert f" Usage: {usage} " in run(name, "--help").out


def test_check_names_its_table_of_settings(run: Runner) -> None:
    assert "[tool.gradscope.check] in the nearest" in run("check", "--help").out


def test_what_checks_values_is_not_quoted(run: Runner) -> None:
    ran = run("show", "run.json", "--format", "foo")
    assert ran.code == 2 and "'foo' is not one of 'terminal', 'json'" in ran.err and "Value error" not in ran.err
