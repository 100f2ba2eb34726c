"""``gradscope fix`` of a model file: what is printed, written and refused, and the exit codes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradscope import recipes
from gradscope.errors import OutputError, UsageError
from gradscope.fixing import load_fix, script
from gradscope.fixing import run as fixing
from gradscope.fixing.report import FixReport
from gradscope.patching.match.matchers import MATCHERS
from tests.cli_fixtures import Runner, frames_of_ours, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fixing.fix_fixtures import (  # noqa: F401
    FAST,
    MODEL,
    folder_fixture,
    gains_fixture,
)
from tests.made_times import BETTER, SLOWER, Saves

Gains = Callable[[Saves], None]

EDIT = """\
-        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # all of them
-        att = att.masked_fill(~self.seen[:length, :length], float("-inf"))
-        att = self.drop(att.softmax(-1))
-        y = att @ v
+        y = attention(
"""


def files() -> set[str]:
    return {path.name for path in Path().iterdir() if not path.name.startswith(("__pycache__", ".git"))}


def row_of(report: str) -> str:
    """The row of both layers, with one space between its cells."""
    return " ".join(next(line for line in report.splitlines() if line.startswith("layers.* ×2")).split())


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True)


def test_found_proved_and_written_down(folder: Path, gains: Gains, run: Runner) -> None:
    ran = run("fix", "model.py", *FAST)
    assert (ran.code, ran.err) == (0, "")
    assert row_of(ran.out).startswith("layers.* ×2 model.py:23 attention kept 1.00 ms 8.39 MB ")
    assert "2 of 2 call sites replaced: a step is 2.00 times as fast and needs 3.00 times less memory." in ran.out
    assert "patch -p1 < gradscope-model-fix.diff" in ran.out
    assert files() == {
        "model.py",
        "train.py",
        "gradscope-model-fix.json",
        "gradscope-model-fix.diff",
        "gradscope-model-fix.html",
    }
    assert Path("model.py").read_text() == MODEL
    found = load_fix("gradscope-model-fix.json")
    assert [(site.path, site.source, site.recipe, site.status) for site in found.sites] == [
        (f"layers.{index}", "model.py:23", "attention", "kept") for index in range(2)
    ]
    assert found.before is not None and found.after is not None
    assert (found.before.wall_ns, found.after.wall_ns, found.after.peak_bytes) == (2_000_000, 1_000_000, 4 << 20)
    assert found.before.measured == "alternating" and found.before.backward_ns
    assert found.loss_difference is not None and found.loss_difference < 1e-6
    assert [site.time for site in found.sites] == ["less", "less"]
    assert [site.measured_saving_ns for site in found.sites] == [500_000, 500_000], "they add up to the step's"
    assert [site.predicted_saving_ns for site in found.sites] == [BETTER.ns] * 2, "as the profile expects"
    assert found.time == "less"
    assert EDIT in found.diff and Path("gradscope-model-fix.diff").read_text().endswith(found.diff)


def test_the_diff_applies(folder: Path, gains: Gains, run: Runner) -> None:
    assert run("fix", "model.py", *FAST).code == 0
    with Path("gradscope-model-fix.diff").open() as text:
        subprocess.run(["patch", "-p1"], stdin=text, check=True, capture_output=True)
    patched = Path("model.py").read_text()
    Path("model.py").write_text(MODEL)
    sys.modules.pop("model", None)
    assert run("fix", "model.py", "--write", *FAST).code == 0
    assert Path("model.py").read_text() == patched


def test_write(folder: Path, gains: Gains, run: Runner) -> None:
    Path("model.py.bak").write_text("somebody's")
    ran = run("fix", "model.py", "--write", *FAST[:-1])
    assert ran.code == 0
    assert "Written: model.py." in ran.out and "gradscope: changed model.py; as it was: model.py.bak1\n" in ran.err
    assert Path("model.py.bak").read_text() == "somebody's" and Path("model.py.bak1").read_text() == MODEL
    assert json.loads(Path("gradscope-model-fix.json").read_text())["written"] == ["model.py"]
    losses = []
    for name in ("model.py.bak1", "model.py"):
        shutil.copy(name, "written.py")
        code = "import written, torch; m, x = written.workload(); m.eval(); print(repr(m(x).square().mean().item()))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        losses.append(float(done.stdout))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    sys.modules.pop("model", None)
    again = run("fix", "model.py", *FAST)
    assert again.code == 0 and "No recipe matches this model." in again.out


def test_write_refuses_what_git_does_not_know(folder: Path, gains: Gains, run: Runner) -> None:
    git("init", "-q")
    git("add", "model.py")
    git("commit", "-qm", "a model")
    Path("model.py").write_text(MODEL + "\n# mine\n")
    ran = run("fix", "model.py", "--write", *FAST)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "gradscope: error: model.py has changes that are not committed: --write would mix its own with them.\n"
        "Commit or stash them first, or write all the same with --force.\n"
    )
    assert files() == {"model.py", "train.py"} and Path("model.py").read_text() == MODEL + "\n# mine\n"
    sys.modules.pop("model", None)
    assert run("fix", "model.py", "--write", "--force", *FAST).code == 0
    assert "from gradscope.recipes import attention" in Path("model.py").read_text()
    assert Path("model.py").read_text().endswith("\n# mine\n")


@pytest.mark.parametrize("target", ["model.py", "train.py"])
def test_write_refuses_before_anything_is_measured(
    folder: Path, gains: Gains, run: Runner, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A profile takes a minute or more, and what git does not know is known without it."""
    git("init", "-q")

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("measured for nothing")

    monkeypatch.setattr(fixing, "profiled", measured)
    monkeypatch.setattr(script._Runs, "_profile", measured)
    ran = run("fix", target, "--write", *FAST)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert ran.err.startswith(f"gradscope: error: {target} has changes that are not committed")
    assert files() == {"model.py", "train.py"}


def test_write_passes_over_changes_in_files_that_stay_as_they_are(folder: Path, gains: Gains, run: Runner) -> None:
    git("init", "-q")
    git("add", "model.py")
    git("commit", "-qm", "a model")
    Path("notes.py").write_text("# not committed\n")
    ran = run("fix", "model.py", "--write", *FAST)
    assert ran.code == 0 and "Written: model.py." in ran.out, ran.err


def test_write_refuses_a_file_that_changed(folder: Path, gains: Gains, run: Runner, monkeypatch: Any) -> None:
    save = FixReport.write

    def changed_first(report: FixReport) -> Any:
        Path("model.py").write_text("print('other')\n")
        return save(report)

    monkeypatch.setattr(FixReport, "write", changed_first)
    ran = run("fix", "model.py", "--write", *FAST)
    assert ran.code == 2
    assert ran.err == (
        "gradscope: error: model.py was changed while it was measured: what was proved is not what stands there now.\n"
        "Nothing was written; run gradscope fix again.\n"
    )
    assert "2 of 2 call sites replaced" in ran.out, "what was measured is shown all the same"
    assert Path("model.py").read_text() == "print('other')\n" and "model.py.bak" not in files()


def test_dry_run(folder: Path, gains: Gains, run: Runner) -> None:
    ran = run("fix", "model.py", "--dry-run", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert files() == {"model.py", "train.py"}
    assert "plan    dry run: nothing is verified, measured or written; savings are estimates" in ran.out
    assert row_of(ran.out) == "layers.* ×2 model.py:23 attention found ~2.00 ms ~16.8 MB"
    assert (
        "2 of 2 call sites can be replaced." in ran.out and "gradscope fix model.py  verify and measure them" in ran.out
    )


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recipes.attention

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) + 1e-3

    monkeypatch.setattr(recipes, "attention", wrong)


def test_a_wrong_recipe_is_exit_5_and_leaves_the_file_alone(
    folder: Path, gains: Gains, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    ran = run("fix", "model.py", "--write", "--only", "attention", *FAST)
    assert ran.code == 5
    assert ran.err == "gradscope: your source was not changed: a recipe failed verification\n"
    assert "None of 2 call sites was replaced: 2 failed verification and were undone." in ran.out
    assert "is off by" in ran.out
    assert Path("model.py").read_text() == MODEL
    assert files() == {"model.py", "train.py", "gradscope-model-fix.json"}
    found = load_fix("gradscope-model-fix.json")
    assert found.failed and found.diff == "" and {site.status for site in found.sites} == {"undone"}


def test_what_is_slower_is_undone(folder: Path, gains: Gains, run: Runner) -> None:
    gains(SLOWER)
    ran = run("fix", "model.py", "--write", *FAST)
    assert ran.code == 0
    assert ran.err == "gradscope: your source was not changed: no replacement was kept\n"
    assert "undone: the step is slower with it" in ran.out
    assert "None of 2 call sites was replaced; the model is unchanged." in ran.out
    found = load_fix("gradscope-model-fix.json")
    assert found.after is None and found.before is not None and found.before.measured == "alternating"


def test_an_earlier_fix_is_taken_back(folder: Path, gains: Gains, run: Runner) -> None:
    assert run("fix", "model.py", *FAST).code == 0
    assert {"gradscope-model-fix.diff", "gradscope-model-fix.html"} <= files()
    gains(SLOWER)
    sys.modules.pop("model", None)
    assert run("fix", "model.py", *FAST).code == 0
    assert files() == {"model.py", "train.py", "gradscope-model-fix.json"}


@pytest.mark.parametrize(("options", "places"), [(("--only", "attention"), 2), (("--skip", "attention"), 0)])
def test_only_and_skip(folder: Path, gains: Gains, run: Runner, options: tuple[str, ...], places: int) -> None:
    ran = run("fix", "model.py", "--dry-run", "-q", *options)
    assert ("2 of 2 call sites can be replaced." in ran.out) is (places == 2)
    assert ("No recipe matches this model." in ran.out) is (places == 0)


def test_json_to_stdout_alone(folder: Path, gains: Gains, run: Runner) -> None:
    ran = run("fix", "model.py", "--json", "-", *FAST)
    assert json.loads(ran.out)["kind"] == "fix" and files() == {"model.py", "train.py"}


def test_prefix_and_no_page(folder: Path, gains: Gains, run: Runner) -> None:
    assert run("fix", "model.py", "-o", "mine", "--no-html", *FAST).code == 0
    assert files() == {"model.py", "train.py", "mine.json", "mine.diff"}


@pytest.mark.parametrize("name", ["gradscope-model-fix.json", "gradscope-model-fix.diff", "gradscope-model-fix.html"])
def test_a_file_of_somebody_elses_is_kept(folder: Path, gains: Gains, run: Runner, name: str) -> None:
    Path(name).write_text("--- a/mine\n")
    ran = run("fix", "model.py", *FAST)
    assert ran.code == 2 and ran.err.startswith(f"gradscope: error: {name} exists and was not written by gradscope.")
    assert run("fix", "model.py", "--force", *FAST).code == 0
    assert Path(name).read_text() != "--- a/mine\n"


KNOWN = ", ".join(MATCHERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.py", "--dry-run", "--write"), "--dry-run writes nothing, and --write does: give one of them."),
        (("model.py", "--dry-run", "--json", "-"), "--dry-run writes no FIX.json: leave out --json."),
        (("model.py", "--dry-run", "--json", "x.json"), "--dry-run writes no FIX.json: leave out --json."),
        (
            ("model.py", "--only", "atention"),
            f"--only: no recipe to patch in is called atention.\nThere are {KNOWN}.",
        ),
        (("model.py", "--skip", ","), f"--skip: it names no recipe.\nThere are {KNOWN}."),
        (("model.py", "--skip", KNOWN.replace(" ", "")), f"--skip leaves out every recipe that there is: {KNOWN}."),
        (
            ("model.py", "--only", "attention", "--skip", "rope"),
            "--only and --skip both choose recipes: give one of them.",
        ),
        (("gone.py",), "there is no file gone.py.\nDid you mean model.py?"),
        (("model.py", "-o", "a", "--json", "b"), "-o and --json both say where FIX.json goes: give one of them."),
        (
            ("model.py", "--onyl", "attention"),
            "gradscope fix has no option --onyl; did you mean --only?\n"
            "Options of the script itself go after '--': gradscope fix model.py -- --onyl attention",
        ),
        (("train.py", "--device", "cuda"), None),
    ],
)
def test_what_cannot_be_used(folder: Path, run: Runner, arguments: tuple[str, ...], message: str | None) -> None:
    ran = run("fix", *arguments)
    assert (ran.code, ran.out) == (2, "")
    if message is not None:
        assert ran.err == f"gradscope: error: {message}\n"
    assert files() == {"model.py", "train.py"}


def test_the_users_own_error(folder: Path, gains: Gains, run: Runner) -> None:
    ran = run("fix", "model.py:broken", *FAST)
    assert ran.code == 1 and ran.err.endswith("ValueError: out of data\n")
    assert not frames_of_ours(ran.err)


@pytest.mark.parametrize("code", ["0", "3", "'enough'"])
def test_a_model_that_leaves_is_told(folder: Path, run: Runner, code: str) -> None:
    """Its own exit code would end the command without a word, with 0 as if all was well."""
    Path("model.py").write_text(
        MODEL.replace("def forward(", f"def forward(self, *_):\n        raise SystemExit({code})\n\n    def other(", 1)
    )
    ran = run("fix", "model.py", *FAST)
    text = f"SystemExit: {code.strip(chr(39))}"
    assert ran.code == 3
    assert ran.err.endswith(
        f"gradscope: error: model.py left with {text} while it was profiled: nothing can be proved.\n"
    )


@pytest.mark.parametrize("file", ["save", "to_html"])
def test_where_there_is_no_room_the_changed_file_is_named_all_the_same(
    folder: Path, gains: Gains, run: Runner, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OutputError("it cannot be written: no space left.")

    monkeypatch.setattr(FixReport, file, full)
    ran = run("fix", "model.py", "--write", *[option for option in FAST if option != "-q"])
    assert ran.code == 2 and Path("model.py.bak").read_text() == MODEL != Path("model.py").read_text()
    assert "gradscope: changed model.py; as it was: model.py.bak\n" in ran.err
    assert ran.err.endswith("gradscope: error: it cannot be written: no space left.\n")


def test_nothing_matches(folder: Path, gains: Gains, run: Runner) -> None:
    ran = run("fix", "model.py:plain", *FAST)
    assert ran.code == 0 and "No recipe matches this model." in ran.out
    assert "gradscope recipes" in ran.out


@pytest.mark.parametrize("stage", ["plan_of", "verify", "profiled"])
def test_an_interrupted_run_writes_nothing(
    folder: Path, gains: Gains, run: Runner, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    real: Callable[..., Any] = getattr(fixing, stage)
    calls = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(stage)
        if stage != "profiled" or len(calls) == 2:  # the second profile runs with the recipes in
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(fixing, stage, interrupted)
    made: list[Any] = []
    workload = fixing.fix_workload

    def kept(loaded: Any, *args: Any) -> Any:
        made.append(loaded.model)
        return workload(loaded, *args)

    monkeypatch.setattr(fixing, "fix_workload", kept)
    random = torch.get_rng_state()
    ran = run("fix", "model.py", "--write", *FAST)
    assert ran.code == 130 and ran.err == "gradscope: interrupted; nothing was written\n"
    assert files() == {"model.py", "train.py"} and Path("model.py").read_text() == MODEL
    assert not any("forward" in vars(module) for module in made[0].modules())
    assert random is not None and os.getcwd() == str(folder)


def test_memory_budget(folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """By option, else by pyproject.toml: both profiles of a fix are taken within it."""
    seen: list[int] = []

    def stop(workload: Any, settings: Any, *_: Any) -> FixReport:
        seen.append(settings.options.memory_budget)
        raise UsageError("seen")

    monkeypatch.setattr(fixing, "fix_workload", stop)
    Path("pyproject.toml").write_text('[tool.gradscope]\nmemory-budget = "2GiB"\n')
    run("fix", "model.py")
    run("fix", "model.py", "--memory-budget", "1g")
    assert seen == [2 * 1024**3, 1024**3]
