"""Limits in a test and in GitHub Actions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradscope.errors import GradscopeError, UsageError
from gradscope.integrations.pytest import assert_within
from gradscope.report.report import Report
from gradscope.report.runfile import to_json
from tests.diff_fixtures import MS, run

pytest_plugins = ["pytester"]

FAST, SLOW = (run({"": [0] * 5, "a": [each * MS] * 5, "b": [10 * MS] * 5}, saved={"a": 4096}) for each in (10, 20))


def test_a_layer_over_its_budget_fails_the_test() -> None:
    assert_within(Report(FAST), Report(FAST), max_regression=["5%", "a=5%"])
    with pytest.raises(AssertionError, match=r"(?s)a .*5 %") as failed:
        assert_within(Report(SLOW), Report(FAST), max_regression=["a=5%"])
    assert "over" in str(failed.value)


def test_memory_needs_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(FAST), encoding="utf-8")
    assert_within(path, max_peak="1GiB", max_saved=4096)
    with pytest.raises(AssertionError):
        assert_within(path, max_peak=100)
    with pytest.raises(UsageError):
        assert_within(path, max_regression=["5%"])


def test_what_is_over_is_named_first_and_one_limit_may_be_a_text() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_within(Report(SLOW), Report(FAST), max_regression="5%", max_peak=100)
    first, _, table = str(failed.value).partition("\n")
    assert first == "over the limit: backward of the step, peak of the step" and "Limits" in table


def test_each_limit_is_its_own() -> None:
    """Of a run that saves 4096 bytes, and has 8192 at the peak."""
    assert_within(Report(FAST), max_peak=8192, max_saved=4096)
    with pytest.raises(AssertionError, match=r"^over the limit: saved of the step\n"):
        assert_within(Report(FAST), max_peak=8192, max_saved=4095)
    more = run({"": [0] * 5, "a": [10 * MS] * 5, "b": [10 * MS] * 5}, saved={"a": 5000})
    assert_within(Report(more), Report(FAST), max_memory_regression="25%")
    with pytest.raises(AssertionError, match=r"^over the limit: peak of the step, saved of the step\n"):
        assert_within(Report(more), Report(FAST), max_memory_regression="20%")


def test_where_noise_hides_a_limit_only_a_strict_test_fails() -> None:
    noisy = run({"": [0] * 5, "a": [10 * MS] * 5, "b": [10 * MS] * 5}, wall=[-9 * MS, 9 * MS, 0, -9 * MS, 9 * MS])
    assert_within(Report(noisy), Report(noisy), max_regression="5%")
    with pytest.raises(AssertionError, match=r"^noise hides the limit: backward of the step: cannot see below"):
        assert_within(Report(noisy), Report(noisy), max_regression="5%", strict=True)


@pytest.mark.parametrize(
    ("given", "limits", "message"),
    [
        (None, {"max_peak": 1}, "run is None; it must be a Report or the path of a RUN.json."),
        (FAST, {}, "run is .*; it must be a Report or the path"),
        (
            Report(FAST),
            {"max_regression": [5]},
            "max_regression: 5 is not a percentage.\nGive a text with its sign: '5%'",
        ),
        (Report(FAST), {"max_regression": 0.05}, "max_regression: 0.05 is not a percentage."),
        (Report(FAST), {"max_regression": "5"}, "max_regression: 5 is not a percentage."),
        (
            Report(FAST),
            {"max_regression": "5%"},
            "a regression needs a run to compare with.\nGive baseline='BASELINE.json',",
        ),
        (
            Report(FAST),
            {},
            "nothing to check: no limit is given.\nGive max_regression='5%', max_memory_regression='2%', "
            "max_peak='6GiB' or max_saved='2GiB'.",
        ),
        (
            Report(replace(FAST, memory=None)),
            {"max_peak": 1},
            ".*it was not measured.\nProfile again with memory=True.",
        ),
        (
            Report(FAST),
            {"baseline": Report(FAST), "max_regression": "c=5%"},
            "max_regression: no layer of either run m",
        ),
        (
            Report(run({"": [0], "a": [10 * MS]})),
            {"baseline": Report(FAST), "max_regression": "5%"},
            "the run has one measured step, so its noise is unknown.\nProfile again with steps=5 or more.",
        ),
    ],
)
def test_a_limit_without_a_meaning_is_said_as_python_has_it(given: Any, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as raised:
        assert_within(given, **limits)
    assert "--" not in str(raised.value)
    assert [entry.name for entry in raised.traceback][-1] == "assert_within"  # which pytest does not show


@pytest.mark.parametrize("name", ["base--cpu.json", "exp--lr-3 x.json", "a --max-peak 5.json", "--steps-5.json"])
def test_words_of_the_users_stay_as_they_are(name: str) -> None:
    with pytest.raises(GradscopeError, match=rf"^(the file )?{re.escape(name)}") as raised:
        assert_within(name, max_peak=1)
    assert name in str(raised.value)
    with pytest.raises(UsageError, match=r"^max_regression: no layer of either run matches a--b-5"):
        assert_within(Report(FAST), Report(FAST), max_regression="a--b-5=5%")


def test_layers_that_only_one_run_has_are_said_where_the_rest_passes() -> None:
    renamed = run({"": [0] * 5, "a": [10 * MS] * 5, "c": [10 * MS] * 5})
    with pytest.warns(UserWarning, match="^gradscope: not in the ") as heard:
        assert_within(Report(renamed), Report(FAST), max_regression="?=500%")
    assert [str(each.message).partition(":")[2] for each in heard] == [
        " not in the baseline, so not checked: c",
        " not in the run, so not checked: b",
    ]
    assert {each.filename for each in heard} == {__file__}


def test_pytest_shows_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    run_file = pytester.path / "run.json"
    run_file.write_text(to_json(FAST), encoding="utf-8")
    pytester.makepyfile(
        "from gradscope.integrations.pytest import assert_within\n"
        "def test_it(): assert_within('run.json', max_peak=1)\n"
        "def test_other(): assert_within('gone.json', max_peak=1)\n"
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(failed=2)
    assert "__tracebackhide__" not in done.stdout.str() and "integrations/pytest.py" not in done.stdout.str()


# --------------------------------------------------------------------------------------------------------------------
# The action
# --------------------------------------------------------------------------------------------------------------------

MODEL = "import torch\ndef workload(): return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
SCRIPTS = Path(sys.executable).parent

# Stands in for gradscope: writes its arguments down, one a line, and RUN.json.
STUB = """#!/bin/sh
{ echo "[$1]"; shift; for word in "$@"; do printf '%s\\n' "$word"; done; } >> "$RUNNER_TEMP/calls"
case "$*" in *--json*) echo '{}' > "$3" ;; *markdown*) echo the difference ;; esac
"""


def act(folder: Path, tools: Path = SCRIPTS, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the action's script, as a runner's bash does: it stops at the first error."""
    action = (Path(__file__).parents[2] / "action.yml").read_text(encoding="utf-8")
    script = "\n".join(line[8:] for line in action.split("run: |\n", 1)[1].splitlines())
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        "TARGET": "model.py",
        "BASELINE": "",
        "LIMITS": "",
        "PROFILE_OPTIONS": "--steps 2 --warmup 1",
        **inputs,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def stub(folder: Path) -> Path:
    path = folder / "gradscope"
    path.write_text(STUB, encoding="utf-8")
    path.chmod(0o755)
    return folder


def calls(folder: Path) -> dict[str, list[str]]:
    """The words that each command of gradscope was given last."""
    found: dict[str, list[str]] = {}
    for line in (folder / "calls").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            words = found[line.strip("[]")] = []
        else:
            words.append(line)
    return found


@pytest.mark.parametrize(("limit", "code"), [("1GiB", 0), ("1", 4)])
def test_the_action_writes_the_summary_and_ends_as_the_check(limit: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    done = act(tmp_path, LIMITS=f"--max-peak {limit}")
    assert done.returncode == code, done.stderr
    summary = (tmp_path / "summary").read_text(encoding="utf-8")
    assert summary.startswith("### gradscope check: model.py\n```\n") and "peak" in summary
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"run={tmp_path}/gradscope.json\n"


def test_the_action_reports_a_script_that_fails_in_the_end(tmp_path: Path) -> None:
    """What it was measured of is checked, and it is red all the same."""
    loop = "for _ in range(8):\n    m(torch.ones(2, 4)).sum().backward(); o.step(); o.zero_grad()\n"
    text = (
        f"import torch\nm = torch.nn.Linear(4, 4)\no = torch.optim.SGD(m.parameters())\n{loop}raise OSError('late')\n"
    )
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    done = act(tmp_path, TARGET="train.py", LIMITS="--max-regression 5%", PROFILE_OPTIONS="--warmup 1 --steps 2")
    assert done.returncode == 1 and "OSError: late" in done.stdout
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"run={tmp_path}/gradscope.json\n"
    summary = (tmp_path / "summary").read_text(encoding="utf-8")
    assert "gradscope profile failed with exit code 1.\n```\n" in summary and "--baseline" in summary


def test_the_action_says_why_nothing_was_profiled(tmp_path: Path) -> None:
    done = act(tmp_path, TARGET="gone.py")
    assert done.returncode == 2 and not (tmp_path / "output").exists()
    assert "gone.py" in (tmp_path / "summary").read_text(encoding="utf-8").partition("```\n")[2]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("--max-peak 1GiB\n--max-saved 1\n", ["--max-peak", "1GiB", "--max-saved", "1"]),
        ("--max-regression 'h.*.a b=5%'  --strict", ["--max-regression", "h.*.a b=5%", "--strict"]),
        ('--max-regression "*=5%" $(touch no) `touch no` $HOME', None),
        (" \n ", []),
        (
            "--max-regression C:\\new\\='5%' \"a\\b\" 'c\\d' e\\",
            ["--max-regression", "C:\\new\\=5%", "a\\b", "c\\d", "e\\"],
        ),
        ("--max-peak \\\n 1GiB \\\n  --strict", ["--max-peak", "1GiB", "--strict"]),
        ("# it's a limit\n--max-peak 1GiB\n  # --strict\n", ["--max-peak", "1GiB"]),
        ("# none", []),
    ],
)
def test_the_action_splits_lines_and_quotes_and_expands_nothing(
    limits: str, words: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "h.0.a").touch()
    assert act(tmp_path, stub(tmp_path), LIMITS=limits, PROFILE_OPTIONS=limits).returncode == 0
    wanted = ["--max-regression", "*=5%", *limits.split()[2:]] if words is None else words
    run = str(tmp_path / "gradscope.json")
    assert calls(tmp_path)["check"] == [run, *wanted]
    assert calls(tmp_path)["profile"] == ["model.py", "--json", run, "--no-html", "--force", *wanted]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("options", ["--steps 2 --warmup 1 --json other.json", "--help"])
def test_the_action_is_red_where_nothing_was_checked(options: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    done = act(tmp_path, PROFILE_OPTIONS=options, LIMITS="--max-peak 1")
    assert done.returncode == 2 and "no run was written, so nothing was checked" in done.stderr
    assert "nothing was checked" in (tmp_path / "summary").read_text(encoding="utf-8")


def test_the_action_compares_with_the_baseline(tmp_path: Path) -> None:
    done = act(tmp_path, stub(tmp_path), TARGET="my model.py", BASELINE="the base.json")
    assert done.returncode == 0, done.stderr
    run = str(tmp_path / "gradscope.json")
    assert calls(tmp_path)["profile"][0] == "my model.py"
    assert calls(tmp_path)["check"] == [run, "--baseline", "the base.json"]
    assert calls(tmp_path)["diff"] == ["the base.json", run, "--format", "markdown"]
    assert (tmp_path / "summary").read_text(encoding="utf-8").endswith("```\nthe difference\n")


def test_a_second_action_of_a_job_keeps_the_first_run(tmp_path: Path) -> None:
    for _ in range(2):
        assert act(tmp_path, stub(tmp_path)).returncode == 0
    assert calls(tmp_path)["check"] == [str(tmp_path / "gradscope-2.json")]
    runs = [f"run={tmp_path}/gradscope{number}.json\n" for number in ("", "-2")]
    assert (tmp_path / "output").read_text(encoding="utf-8") == "".join(runs)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"TARGET": "--help"}, "target is --help, which is an option"),
        ({"LIMITS": "--max-peak 1 --help"}, "limits has --help, which checks nothing"),
        ({"LIMITS": "--max-peak '1"}, "a quote is left open in: --max-peak '1"),
    ],
)
def test_the_action_says_what_it_cannot_read(inputs: dict[str, str], said: str, tmp_path: Path) -> None:
    done = act(tmp_path, stub(tmp_path), **inputs)
    assert done.returncode == 2 and said in done.stderr and not (tmp_path / "calls").exists()
