"""``gradscope rules``, and ``--ignore`` with the settings of pyproject.toml."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradscope
from gradscope.cli import profile as profile_command
from gradscope.cli.options import ignored_rules
from gradscope.cli.rules import rules_markdown
from gradscope.diagnose.engine import every_rule
from gradscope.diagnose.rules import RULES
from gradscope.errors import UsageError
from gradscope.report import Report
from tests import report_fixtures as fixtures
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)

RULE = "attention-by-hand"
MODEL = """
import torch
raise SystemExit("the target was imported")
def workload(): ...
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(text: str) -> str:
    path = Path("pyproject.toml")
    path.write_text(text, encoding="utf-8")
    return str(path.resolve())


# -- the list, and one in full -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_list_has_every_rule_and_its_title(width: int, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("rules")
    assert (ran.code, ran.err) == (0, "")
    flat = " ".join(ran.out.split())
    for rule in every_rule():
        assert f"{rule.name} {' '.join(rule.title.split())}" in flat
    assert all(len(line) <= max(width, max(map(len, RULES)) + 2) for line in ran.out.splitlines())


@pytest.mark.parametrize("name", list(RULES))
def test_one_rule_is_its_whole_text(name: str, run: Runner) -> None:
    ran = run("rules", name)
    assert (ran.code, ran.err) == (0, "")
    about = RULES[name].about.replace("``", "").replace("::", ":")
    flat = " ".join(ran.out.split())
    assert " ".join(about.split()) in flat
    assert ran.out.startswith(f"{name}  ")
    assert f"--ignore {name}" in flat


def test_examples_keep_their_lines(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("rules", RULE).out.splitlines()
    assert "    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))" in lines
    for label in ("Pattern:", "Evidence:", "Estimate:", "Source:"):
        assert sum(line.startswith(label) for line in lines) == 1
    assert "\x1b[" not in "".join(lines)
    assert "\x1b[" in run("rules", RULE, "--color", "always").out


def test_a_rule_that_there_is_not(run: Runner) -> None:
    ran = run("rules", "atention-by-hand")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "gradscope: error: there is no rule 'atention-by-hand'.\n"
        "Did you mean attention-by-hand? gradscope rules lists them all.\n"
    )
    assert run("rules", "x" * 4_000).err.startswith(f"gradscope: error: there is no rule '{'x' * 60}...'.\n")
    assert run("rules", "@").err.endswith("\ngradscope rules lists them all.\n")
    assert run("rules", RULE, "--markdown").code == 2


def test_the_reference_has_every_rule(request: pytest.FixtureRequest, run: Runner) -> None:
    """``gradscope rules --markdown`` prints what stands between the marks."""
    text = (request.config.rootpath / "docs" / "findings.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^<!-- rules -->\n(.*?)^<!-- /rules -->$", text, re.DOTALL | re.MULTILINE)
    assert shown == rules_markdown(every_rule()) == run("rules", "--markdown").out


# -- leaving rules out ----------------------------------------------------------------------------------------------


def test_names_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "another", dataclasses.replace(RULES[RULE], name="another"))
    monkeypatch.setitem(RULES, "third", dataclasses.replace(RULES[RULE], name="third"))
    assert ignored_rules(None) == ()
    assert ignored_rules([f"{RULE}, another,", "another"]) == (RULE, "another")
    settings('[tool.gradscope]\nignore = ["third", "another"]\n')
    assert ignored_rules([RULE]) == (RULE, "third", "another")
    assert ignored_rules(None) == ("third", "another")


def test_unknown_names_say_where_they_are() -> None:
    with pytest.raises(UsageError, match=r"^--ignore: there is no rule 'nothing'; gradscope rules lists them\.$"):
        ignored_rules(["nothing"])
    settings('[tool.gradscope]\nignore = ["nothing"]\n')
    with pytest.raises(UsageError, match=r"^pyproject\.toml: tool\.gradscope\.ignore: there is no rule 'nothing'"):
        ignored_rules([RULE])


@pytest.mark.parametrize("where", ["option", "file"])
def test_unknown_names_stop_before_anything_runs(where: str, run: Runner) -> None:
    Path("model.py").write_text(MODEL, encoding="utf-8")
    arguments = ["--ignore", "nothing"] if where == "option" else []
    if where == "file":
        settings('[tool.gradscope]\nignore = ["nothing"]\n')
    ran = run("profile", "model.py", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "there is no rule 'nothing'" in ran.err and "imported" not in ran.err
    assert not list(Path().glob("gradscope-*"))


def test_profile_leaves_rules_out(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[profile_command.ProfileRequest] = []

    def keep(request: profile_command.ProfileRequest, *, whole_process: bool) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(profile_command, "run", keep)
    assert run("profile", "model.py", "--ignore", RULE).code == 0
    settings(f'[tool.gradscope]\nignore = ["{RULE}"]\n')
    assert run("profile", "model.py").code == 0
    assert [request.options.ignore for request in seen] == [(RULE,), (RULE,)]


@pytest.fixture(name="saved")
def saved_fixture() -> None:
    """run.json with findings, one of them of a rule that there is."""
    first, *others = fixtures.findings()
    found = (dataclasses.replace(first, rule=RULE), *others)
    Report(fixtures.gpt(findings=found)).save("run.json")


@pytest.mark.usefixtures("saved")
def test_show_leaves_rules_out(run: Runner) -> None:
    words = "attention is computed by hand"
    for form in ("terminal", "markdown"):
        whole = run("show", "run.json", "-f", form).out
        less = run("show", "run.json", "-f", form, "--ignore", RULE).out
        assert words in whole and words not in less
        assert "many small operations" in less
    settings(f'[tool.gradscope]\nignore = ["{RULE}"]\n')
    assert words not in run("show", "run.json").out
    assert run("show", "run.json", "-f", "html", "-o", "run.html").code == 0
    assert words not in Path("run.html").read_text(encoding="utf-8")
    assert words in run("show", "run.json", "-f", "json").out  # the file's own


@pytest.mark.usefixtures("saved")
def test_show_refuses_what_it_cannot_leave_out(run: Runner) -> None:
    assert run("show", "run.json", "--ignore", "nothing").code == 2
    ran = run("show", "run.json", "-f", "csv", "--ignore", RULE)
    assert ran.code == 2
    assert "--ignore is for what is read by people: csv always holds every finding." in ran.err


def test_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(UsageError, match="there is no rule 'nothing'"):
        gradscope.profile(nn.Module(), batch, ignore=["nothing"])
    with pytest.raises(UsageError, match="there is no rule 'nothing'"):
        gradscope.profiling(model, ignore=["nothing"])
    always = gradscope.tables.Finding("always", "info", (), None, "it always fires", "so it does")
    monkeypatch.setitem(RULES, "always", dataclasses.replace(RULES[RULE], name="always", find=lambda case: [always]))
    options = {"steps": 1, "warmup": 0, "memory": False, "lines": False}
    assert "always" in set(gradscope.profile(model, batch, **options).findings["rule"])
    assert "always" not in set(gradscope.profile(model, batch, ignore=["always"], **options).findings["rule"])
    with gradscope.profiling(model, ignore=["always"], **options) as prof:
        for _ in range(10):
            model(batch).sum().backward()
            if prof.step():
                break
    assert "always" not in set(prof.report.findings["rule"])
