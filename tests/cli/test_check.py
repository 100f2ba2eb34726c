"""``gradscope check``: exit codes, settings of pyproject.toml, and what goes where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.report import Report
from gradscope.tables import RunData
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.diff_fixtures import MS, around
from tests.diff_fixtures import run as make_run

NOTHING = (0, 0, 0, 0, 0)


@pytest.fixture(name="files", autouse=True)
def files_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """base.json; slow.json, a fifth slower and with a tenth more memory; same.json."""
    monkeypatch.chdir(tmp_path)
    Report(_net(100 * MS, 1_000_000)).save("base.json")
    Report(_net(120 * MS, 1_100_000)).save("slow.json")
    Report(_net(100 * MS, 1_000_000)).save("same.json")


def _net(mean: int, saved: int) -> RunData:
    return make_run({"": NOTHING, "h": NOTHING, "h.0": around(mean, MS)}, wall=around(0, MS), saved={"h.0": saved})


def test_within_the_limit(run: Runner) -> None:
    ran = run("check", "same.json", "--baseline", "base.json", "--max-regression", "5%")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("PASSED: the value is within the limit.\n")


def test_over_the_limit(run: Runner) -> None:
    ran = run("check", "slow.json", "--baseline", "base.json", "--max-regression", "5%")
    assert ran.code == 4
    assert ran.err == "gradscope: error: over the limit: backward of the step.\n"
    assert "OVER  the step  backward  100 ms  120 ms  +20.0 %   +5 %  ±1.91 ms\n" in ran.out
    assert ran.out.endswith("FAILED: 1 of 1 value is over the limit.\n")


def test_every_limit(run: Runner) -> None:
    options = ["--max-regression", "30%", "--max-regression", "h.*=10%", "--max-memory-regression", "2%"]
    ran = run("check", "slow.json", "--baseline", "base.json", *options, "--max-peak", "2MB", "--max-saved", "1GiB")
    assert ran.code == 4
    assert ran.err == ("gradscope: error: over the limit: backward of h.0, peak of the step, saved of the step.\n")
    assert ran.out.endswith("FAILED: 4 of 6 values are over the limit.\n")


def test_json(run: Runner) -> None:
    ran = run("check", "slow.json", "--baseline", "base.json", "--max-regression", "5%", "--json")
    assert ran.code == 4
    assert ran.err == "gradscope: error: over the limit: backward of the step.\n"
    record = json.loads(ran.out)
    assert (record["passed"], [one["result"] for one in record["values"]]) == (False, ["over"])
    assert json.loads(run("check", "same.json", "--max-peak", "1GiB", "--json").out)["passed"] is True


def test_a_limit_below_the_noise_is_inconclusive_and_fails_where_strict(run: Runner) -> None:
    noisy = make_run({"": NOTHING, "h": around(100 * MS, MS)}, wall=around(0, 25 * MS))
    Report(noisy).save("noisy.json")
    options = ["check", "noisy.json", "--baseline", "noisy.json", "--max-regression", "5%"]
    ran = run(*options)
    assert (ran.code, ran.err) == (0, "")
    assert "\n- inconclusive: backward of the step: cannot see below 48 %\n" in ran.out
    assert "PASSED" not in ran.out and "INCONCLUSIVE: 1 of 1 value is inconclusive" in ran.out
    strict = run(*options, "--strict")
    assert strict.code == 4 and "FAILED (--strict): INCONCLUSIVE" in strict.out
    assert strict.err == (
        "gradscope: error: inconclusive, which --strict makes fail: backward of the step: cannot see below 48 %.\n"
    )
    settings("[tool.gradscope.check]\nstrict = true\n")
    ran = run(*options, "--json")
    record = json.loads(ran.out)
    assert (ran.code, record["passed"], record["result"]) == (4, False, "inconclusive")
    Path("pyproject.toml").unlink()
    record = json.loads(run(*options, "--json").out)
    assert (record["passed"], record["result"], record["values"][0]["result"]) == (True, *["inconclusive"] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["slow.json"],
            "nothing to check: no limit is given.\n"
            "Give --max-regression 5%, --max-memory-regression 2%, --max-peak 6GiB or --max-saved 2GiB.",
        ),
        (
            ["slow.json", "--max-regression", "5%"],
            "a regression needs a run to compare with.\nGive --baseline BASELINE.json, written by gradscope profile.",
        ),
        (
            ["slow.json", "--baseline", "none.json", "--max-regression", "5%"],
            "none.json: no such file.\nWrite one with: gradscope profile TARGET",
        ),
        (
            ["slow.json", "--baseline", "base.json", "--max-regression", "5"],
            "--max-regression: 5 is not a percentage.\nGive one with its sign: 5%",
        ),
        (
            ["slow.json", "--max-peak", "6 apples"],
            "--max-peak: 6 apples is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes.",
        ),
    ],
)
def test_bad_input(arguments: list[str], message: str, run: Runner) -> None:
    ran = run("check", *arguments)
    assert (ran.code, ran.out, ran.err) == (2, "", f"gradscope: error: {message}\n")


# --------------------------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------------------------


def settings(text: str, folder: str = ".") -> str:
    path = Path(folder, "pyproject.toml")
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_limits_of_the_project(run: Runner) -> None:
    settings(
        '[tool.gradscope.check]\nbaseline = "base.json"\nmax-regression = ["5%", "h.*=50%"]\n'
        'max-memory-regression = "20%"\nmax-peak = "1GiB"\nmax-saved = "1GiB"\n'
    )
    ran = run("check", "slow.json")
    assert ran.code == 4
    assert ran.err == "gradscope: error: over the limit: backward of the step.\n"
    assert ran.out.endswith("FAILED: 1 of 6 values is over the limit.\n")


def test_the_command_line_goes_before_the_settings(run: Runner) -> None:
    settings('[tool.gradscope.check]\nbaseline = "none.json"\nmax-regression = "5%"\nmax-peak = "1B"\n')
    ran = run("check", "slow.json", "--baseline", "base.json", "--max-regression", "30%", "--max-peak", "1GiB")
    assert (ran.code, ran.err) == (0, "")


def test_settings_are_found_upwards(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("inner/most").mkdir(parents=True)
    settings('[tool.gradscope.check]\nbaseline = "base.json"\nmax-regression = "5%"\n')
    settings('[project]\nname = "inner"\n', "inner")  # has nothing for gradscope
    monkeypatch.chdir("inner/most")
    ran = run("check", "../../slow.json")
    assert ran.code == 4
    assert run("check", "../../same.json").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[tool.gradscope.check]\nmax_regression = "5%"\n',
            "tool.gradscope.check has no key max_regression.\nDid you mean max-regression?",
        ),
        (
            '[tool.gradscope.chekc]\nmax-peak = "1GiB"\n',
            "tool.gradscope has no key chekc.\nDid you mean check?",
        ),
        (
            "[tool.gradscope.check]\ncolour = 1\n",
            "tool.gradscope.check has no key colour.\n"
            "There are baseline, max-regression, max-memory-regression, max-peak, max-saved, strict.",
        ),
        (
            "[tool.gradscope.check]\nmax-peak = 6\n",
            'tool.gradscope.check.max-peak is not text but 6.\nWrite max-peak = "6GiB"',
        ),
        (
            '[tool.gradscope.check]\nstrict = "yes"\n',
            "tool.gradscope.check.strict is not true or false but 'yes'.\nWrite strict = true",
        ),
        (
            '[tool.gradscope.check]\nmax-regression = ["5%", 3]\n',
            "tool.gradscope.check.max-regression holds 3, which is not text.\n"
            'Write max-regression = ["5%", "h.*.attn=10%"]',
        ),
        (
            '[tool.gradscope.check]\nmax-memory-regression = "much"\n',
            "tool.gradscope.check.max-memory-regression: much is not a percentage.\nGive one with its sign: 5%",
        ),
        (
            '[tool.gradscope.check]\nmax-peak = "much"\n',
            "tool.gradscope.check.max-peak: much is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes.",
        ),
        (
            "tool.gradscope = 3\n",
            "tool.gradscope is not a table.\nWrite [tool.gradscope] and its keys below it.",
        ),
        (
            "tool.gradscope.check = 3\n",
            "tool.gradscope.check is not a table.\nWrite [tool.gradscope.check] and its keys below it.",
        ),
    ],
)
def test_settings_with_mistakes(text: str, message: str, run: Runner) -> None:
    path = settings(text)
    ran = run("check", "slow.json")
    assert (ran.code, ran.out, ran.err) == (2, "", f"gradscope: error: {path}: {message}\n")


def test_settings_that_are_no_toml(run: Runner) -> None:
    path = settings("[tool.gradscope.check\n")
    ran = run("check", "slow.json")
    assert ran.code == 2
    assert ran.err.startswith(f"gradscope: error: {path} is not TOML: ")


def test_a_check_of_time_loads_no_torch() -> None:
    code = (
        "import sys\nfrom gradscope.cli import main\n"
        "try: main(['check', 'same.json', '--baseline', 'base.json', '--max-regression', '5%'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("\nFalse\n")
