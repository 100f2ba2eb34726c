"""The command line against a pipeline that only pretends to measure: options, streams, files, exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradscope.kernels.choice
import gradscope.recipes.norm
from gradscope import pipeline
from gradscope.errors import NothingMeasuredError, Terminated, UsageError, WorkloadError
from gradscope.pipeline import Outcome
from gradscope.report import Report
from gradscope.tables import Options, Progress
from gradscope.workload import Script, Workload
from tests import report_fixtures as fixtures
from tests.cli_fixtures import Runner, frames_of_ours, run_fixture  # noqa: F401 (a fixture is used by its name)

MODEL = "import torch\ndef workload(*args):\n    return torch.nn.Linear(2, 1), torch.ones(3, 2)\n"


@dataclasses.dataclass
class Seen:
    """What the command line handed to the pipeline, and what that shall answer."""

    loaded: Workload | Script | None = None
    options: Options | None = None
    report: Report | None = dataclasses.field(default_factory=lambda: Report(fixtures.mlp()))
    error: BaseException | None = None
    meanwhile: Callable[[], None] = lambda: None


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """A folder with model.py and train.py, and a pipeline that notes what it was asked for."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("train.py").write_text("print('training')\n")
    seen = Seen()

    def measure(loaded: Any, options: Options, progress: Progress) -> Outcome:
        seen.loaded, seen.options = loaded, options
        progress.phase("warm-up", options.warmup)
        progress.advance()
        progress.phase("analysis")
        seen.meanwhile()
        return Outcome(seen.report, seen.error)

    monkeypatch.setattr(pipeline, "profile_workload", measure)
    monkeypatch.setattr(pipeline, "profile_script", measure)
    yield seen
    sys.modules.pop("model", None)


# --------------------------------------------------------------------------------------------------------------------
# profile: what is asked for
# --------------------------------------------------------------------------------------------------------------------


def test_defaults(seen: Seen, run: Runner) -> None:
    ran = run("profile", "model.py")
    assert ran.code == 0
    assert isinstance(seen.loaded, Workload)
    assert seen.options == Options(steps=5, warmup=3, device="auto", seed=None, lines=True, run_to_end=False)
    assert json.loads(Path("gradscope-model.json").read_text())["schema_version"] == 1
    assert ran.out.startswith("gradscope ")
    assert ran.err == (
        "gradscope: warm-up, 3 steps\ngradscope: analysis\n"
        "gradscope: wrote gradscope-model.json\ngradscope: wrote gradscope-model.html\n"
    )


def test_every_option_reaches_the_pipeline(seen: Seen, run: Runner) -> None:
    options = "--steps 7 --warmup 1 --device cpu --seed 11 --no-lines --run-to-end"
    assert run("profile", *options.split(), "model.py").code == 0
    assert seen.options == Options(steps=7, warmup=1, device="cpu", seed=11, lines=False, run_to_end=True)


def test_script_and_its_arguments(seen: Seen, run: Runner) -> None:
    assert run("profile", "train.py", "--steps", "2", "--", "--steps", "9", "--", "-m").code == 0
    assert seen.loaded == Script(Path("train.py"), None, ("--steps", "9", "--", "-m"), "train.py")
    assert seen.options is not None
    assert seen.options.steps == 2


def test_module(seen: Seen, run: Runner) -> None:
    Path("pkg").mkdir()
    Path("pkg/fit.py").touch()
    assert run("profile", "-m", "pkg.fit", "--", "-x").code == 0
    assert seen.loaded == Script(None, "pkg.fit", ("-x",), "pkg.fit")
    assert Path("gradscope-fit.json").exists()


def test_how_the_report_is_shown(seen: Seen, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(Report, "print", lambda self, console, **options: shown.append(options))
    run("profile", "model.py")
    run("profile", "model.py", *["--depth", "2", "--sort", "ratio", "--top", "4", "--min-percent", "0.5"])
    assert shown == [{}, {"depth": 2, "sort": "ratio", "top": 4, "min_percent": 0.5}]


def test_color(seen: Seen, run: Runner) -> None:
    assert "\x1b[" not in run("profile", "model.py").out
    assert "\x1b[" not in run("profile", "model.py", "--color", "never").out
    assert "\x1b[" in run("profile", "model.py", "--color", "always").out


def test_quiet(seen: Seen, run: Runner) -> None:
    ran = run("profile", "model.py", "--quiet")
    assert ran.err == ""
    assert ran.out != ""


# --------------------------------------------------------------------------------------------------------------------
# profile: where it goes
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ("-o run", "run.json"),
        ("-o run.json", "run.json"),
        ("-o out/run.v2", "out/run.v2.json"),
        ("--json other.txt", "other.txt"),
        ("", "gradscope-model.json"),
    ],
)
def test_output(arguments: str, file: str, seen: Seen, run: Runner) -> None:
    Path("out").mkdir()
    ran = run("profile", "model.py", *arguments.split())
    assert ran.code == 0
    assert json.loads(Path(file).read_text())["gradscope"]
    page = f"{file.removesuffix('.json')}.html"
    assert ran.err.endswith(f"gradscope: wrote {file}\ngradscope: wrote {page}\n")


@pytest.mark.parametrize("target", ["zoo/net.py", "zoo/net.py:small", "zoo.net:small"])
def test_output_is_named_after_the_target(target: str, seen: Seen, run: Runner) -> None:
    Path("zoo").mkdir()
    Path("zoo/net.py").write_text(MODEL + "small = workload\n")
    assert run("profile", target).code == 0
    assert Path("gradscope-net.json").exists()
    for name in [name for name in sys.modules if name in {"zoo", "zoo.net", "net"}]:
        del sys.modules[name]


def test_json_on_stdout_is_all_there_is(seen: Seen, run: Runner) -> None:
    seen.meanwhile = lambda: print("a print of the user's")
    ran = run("profile", "model.py", "--json", "-")
    assert json.loads(ran.out)["schema_version"] == 1
    assert "a print of the user's\n" in ran.err
    assert not list(Path.cwd().glob("*.json"))


def test_earlier_run_is_replaced(seen: Seen, run: Runner) -> None:
    assert run("profile", "model.py").code == 0
    assert run("profile", "model.py").code == 0


def test_somebody_elses_file_is_kept(seen: Seen, run: Runner) -> None:
    Path("gradscope-model.json").write_text('{"mine": 1}')
    ran = run("profile", "model.py")
    assert ran.code == 2
    assert ran.err == (
        "gradscope: error: gradscope-model.json exists and was not written by gradscope.\n"
        "Choose another path, or replace it with --force (in Python: force=True).\n"
    )
    assert Path("gradscope-model.json").read_text() == '{"mine": 1}'
    assert seen.options is None, "said after the run, not before"
    assert run("profile", "model.py", "--force").code == 0
    assert "schema_version" in Path("gradscope-model.json").read_text()


def test_missing_folder_is_said_before_anything_runs(tmp_path: Path, seen: Seen, run: Runner) -> None:
    Path("model.py").write_text("raise SystemExit('imported')\ndef workload(): ...\n")
    ran = run("profile", "model.py", "-o", "no/run")
    assert ran.code == 2
    assert ran.err == (
        f"gradscope: error: no/run.json cannot be written: the folder {tmp_path}/no does not exist.\nCreate it first.\n"
    )


@pytest.mark.parametrize("output", ["", "results/"])
def test_o_without_a_name(output: str, seen: Seen, run: Runner) -> None:
    ran = run("profile", "model.py", "-o", output)
    assert ran.code == 2 and seen.options is None
    assert ran.err == (
        f"gradscope: error: -o {output or repr('')} does not name a file.\n"
        f"Give the beginning of a name, such as {output}run.\n"
    )


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**5000], ids=["large", "small", "of many digits"])
def test_a_seed_that_torch_does_not_take(seed: int) -> None:
    shown = str(seed) if abs(seed) < 10**60 else "a very long value"
    with pytest.raises(UsageError) as raised:
        Options(seed=seed)
    assert str(raised.value) == f"seed is {shown}; it must be between -2**63 and 2**64 - 1, as torch's."


@pytest.mark.parametrize("command", ["profile", "fit", "fix"])
def test_a_seed_is_refused_before_anything_runs(command: str, run: Runner) -> None:
    sizes = ["--batch-sizes", "2,4"] if command == "fit" else []
    ran = run(command, "model.py", *sizes, "--seed", str(2**64))
    assert ran.code == 2
    assert ran.err == (
        "gradscope: error: seed is 18446744073709551616; it must be between -2**63 and 2**64 - 1, as torch's.\n"
    )


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_a_seed_that_torch_takes(seed: int) -> None:
    assert Options(seed=seed).seed == seed
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    torch.set_rng_state(state)


def test_o_and_json_together(seen: Seen, run: Runner) -> None:
    ran = run("profile", "model.py", "-o", "a", "--json", "b")
    assert ran.code == 2
    assert ran.err == "gradscope: error: -o and --json both say where RUN.json goes: give one of them.\n"


def test_report_is_printed_though_it_cannot_be_written(seen: Seen, run: Runner) -> None:
    seen.meanwhile = lambda: Path("gradscope-model.json").mkdir()
    ran = run("profile", "model.py")
    assert ran.code == 2
    assert ran.out.startswith("gradscope ")
    assert ran.err.endswith(
        "gradscope: error: gradscope-model.json is a folder.\n"
        "Give the path of a file, such as gradscope-model.json/run.json.\n"
    )


# --------------------------------------------------------------------------------------------------------------------
# profile: how it ends
# --------------------------------------------------------------------------------------------------------------------


def failed(error: BaseException) -> BaseException:
    """The error with the traceback of user code that raised it."""
    try:
        exec(compile("def step():\n    raise error\nstep()\n", "users.py", "exec"), {"error": error})
    except BaseException as raised:
        return raised
    raise AssertionError


def test_users_error_after_a_partial_report(seen: Seen, run: Runner) -> None:
    assert seen.report is not None
    seen.report = Report(dataclasses.replace(seen.report.data, partial=True))
    seen.error = failed(ValueError("boom"))
    ran = run("profile", "train.py")
    assert ran.code == 1
    assert json.loads(Path("gradscope-train.json").read_text())["partial"] is True
    assert ran.out.startswith("gradscope ")
    assert ran.err.endswith("ValueError: boom\n")
    assert 'File "users.py", line 2, in step' in ran.err
    assert not frames_of_ours(ran.err)


def test_frames_of_ours_are_told_by_their_folders() -> None:
    """Not by a name that a clone's or the user's own folder may have."""
    ours = [str(Path(module.__file__)) for module in (gradscope.cli, gradscope.recipes.norm, gradscope.kernels.choice)]
    theirs = ["/home/gradscope/train.py", str(Path(gradscope.__file__).parent.parent / "tests" / "test_cli.py")]
    text = "".join(f'  File "{name}", line 3, in step\n' for name in ours + theirs)
    assert frames_of_ours(text) == ours


def test_users_error_before_anything_was_measured(seen: Seen, run: Runner) -> None:
    seen.report, seen.error = None, failed(ValueError("boom"))
    ran = run("profile", "train.py")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.endswith(
        "ValueError: boom\ngradscope: error: nothing was measured: train.py ended before the measured steps.\n"
    )
    assert not Path("gradscope-train.json").exists()


@pytest.mark.parametrize(
    ("value", "code", "text"), [(7, 7, ""), ("no data", 1, "no data\n"), (None, 0, ""), (0, 0, "")]
)
def test_script_that_exits(value: Any, code: int, text: str, seen: Seen, run: Runner) -> None:
    seen.error = SystemExit(value)
    ran = run("profile", "train.py", "-q")
    assert ran.code == code
    assert ran.err == text
    assert Path("gradscope-train.json").exists()


def test_script_that_exits_well_but_too_early(seen: Seen, run: Runner) -> None:
    seen.report, seen.error = None, SystemExit(0)
    ran = run("profile", "train.py", "-q")
    assert ran.code == 3
    assert ran.err == (
        "gradscope: error: train.py left before one step was measured: there is nothing to report.\n"
        "Let it train for more steps, or measure less: --warmup 1 --steps 2.\n"
    )


def test_interrupted(seen: Seen, run: Runner) -> None:
    seen.error = KeyboardInterrupt()
    ran = run("profile", "train.py", "-q")
    assert ran.code == 130
    assert ran.err == ("gradscope: interrupted; kept: gradscope-train.json (5 measured steps), gradscope-train.html\n")
    assert Path("gradscope-train.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "word"), [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated")]
)
def test_ended_before_a_step_was_measured(error: BaseException, code: int, word: str, seen: Seen, run: Runner) -> None:
    """One line, not one more that nothing was measured."""
    seen.report, seen.error = None, error
    ran = run("profile", "train.py", "-q")
    assert (ran.code, ran.err) == (code, f"gradscope: {word}; nothing was written\n")


def test_ended_after_the_first_file(seen: Seen, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Report, "to_html", interrupt)
    ran = run("profile", "train.py", "-q")
    assert (ran.code, ran.err) == (130, "gradscope: interrupted; kept: gradscope-train.json (5 measured steps)\n")
    monkeypatch.setattr(Report, "save", interrupt)
    assert run("profile", "train.py", "-q").err == "gradscope: interrupted; nothing was written\n", "of this command"


def test_interrupted_outside_the_users_code(seen: Seen, run: Runner) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    seen.meanwhile = interrupt
    ran = run("profile", "train.py")
    assert (ran.code, ran.err.splitlines()[-1]) == (130, "gradscope: interrupted; nothing was written")


def test_terminated_outside_the_users_code(seen: Seen, run: Runner) -> None:
    """As while the trace is read, or reasons are looked for: no traceback of gradscope's own."""

    def end() -> None:
        raise Terminated

    seen.meanwhile = end
    ran = run("profile", "train.py")
    assert (ran.code, ran.err.splitlines()[-1]) == (143, "gradscope: terminated; nothing was written")
    assert "Traceback" not in ran.err


def test_interrupted_while_torch_is_loaded(tmp_path: Path) -> None:
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text("print('loading torch')\nraise KeyboardInterrupt\n")
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "gradscope", "profile", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    # Once: what was loaded in part cannot be loaded again.
    assert (ran.returncode, ran.stdout) == (130, "loading torch\n")
    assert ran.stderr == "gradscope: loading torch and train.py\ngradscope: interrupted; nothing was written\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile", "train.py"),
        ("profile", "-m", "train.py"),
        ("fix", "train.py"),
        ("fit", "train.py", "--batch-sizes", "8"),
    ],
)
def test_something_is_said_before_torch_is_loaded(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Loading it takes seconds: whoever waits sees at once that the program runs; --quiet keeps silent."""
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text(
        "import os, sys\nsys.stderr.flush()\nos.write(2, b'torch is loaded\\n')\nos._exit(9)\n"
    )
    (tmp_path / "train.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for quiet in (False, True):
        command = [sys.executable, "-m", "gradscope", *arguments, *(["-q"] if quiet else [])]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        said = "" if quiet else "gradscope: loading torch and train.py\n"
        assert (ran.returncode, ran.stderr) == (9, f"{said}torch is loaded\n")


@pytest.mark.parametrize(
    ("error", "code"), [(NothingMeasuredError("no backward"), 3), (WorkloadError("loss is a float"), 2)]
)
def test_errors_of_ours(error: Exception, code: int, seen: Seen, run: Runner) -> None:
    def fail() -> None:
        raise error

    seen.meanwhile = fail
    ran = run("profile", "train.py", "-q")
    assert (ran.code, ran.err) == (code, f"gradscope: error: {error}\n")
    seen.meanwhile, seen.report, seen.error = lambda: None, None, error
    ran = run("profile", "train.py", "-q")
    assert (ran.code, ran.err) == (code, f"gradscope: error: {error}\n")


def test_users_error_while_the_file_is_imported(tmp_path: Path, seen: Seen, run: Runner) -> None:
    Path("model.py").write_text("def workload():\n    return undefined\n")
    ran = run("profile", "model.py")
    assert ran.code == 1
    assert ran.err == (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/model.py", line 2, in workload\n'
        "    return undefined\n"
        "           ^^^^^^^^^\n"
        "NameError: name 'undefined' is not defined\n"
    )


def test_users_excepthook_is_used(seen: Seen, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: print("mine:", error, file=sys.stderr))
    seen.error = failed(ValueError("boom"))
    assert run("profile", "train.py", "-q").err == "mine: boom\n"


# --------------------------------------------------------------------------------------------------------------------
# The command line itself, word for word
# --------------------------------------------------------------------------------------------------------------------

USAGE = {
    "an option of the script": (
        "profile train.py --batch-size 8",
        "gradscope profile has no option --batch-size.\n"
        "Options of the script itself go after '--': gradscope profile train.py -- --batch-size 8",
    ),
    "with an equals sign, among ours": (
        "profile train.py --lr=0.1 --steps 3 --fast -- more",
        "gradscope profile has no option --lr.\n"
        "Options of the script itself go after '--': gradscope profile train.py -- --lr=0.1 --fast more",
    ),
    "of a module": (
        "profile -m pkg.fit --lr 0.1",
        "gradscope profile has no option --lr.\n"
        "Options of the script itself go after '--': gradscope profile -m pkg.fit -- --lr 0.1",
    ),
    "a misspelled option": (
        "profile train.py --step 3",
        "gradscope profile has no option --step; did you mean --steps?\n"
        "Options of the script itself go after '--': gradscope profile train.py -- --step 3",
    ),
    "an argument": (
        "profile train.py data",
        "unexpected argument data.\nArguments of the script itself go after '--': gradscope profile train.py -- data",
    ),
    "an option and no target": (
        "profile --wormup 3",
        "gradscope profile has no option --wormup; did you mean --warmup?\nTry: gradscope profile --help",
    ),
    "a missing file": (
        "profile trian.py",
        "there is no file trian.py.\nDid you mean train.py?",
    ),
    "a device that is not known": (
        "profile train.py --device tpu",
        "--device tpu is not known; it is auto, cpu or cuda.",
    ),
    "a table for no table": (
        "show run.json --table lines --format json",
        "--table is for --format csv, not for json, which holds all tables.",
    ),
    "a choice for all": (
        "show run.json --min-percent 3 --format speedscope",
        "--min-percent is for what is read by people: speedscope always holds every layer.",
    ),
    "a run that is not there": (
        "show run.json",
        "run.json: no such file.\nWrite one with: gradscope profile TARGET",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), USAGE.values(), ids=USAGE)
def test_usage(line: str, expected: str, seen: Seen, run: Runner) -> None:
    ran = run(*line.split())
    assert ran.err == f"gradscope: error: {expected}\n"
    assert ran.code == 2
    assert ran.out == ""
    assert seen.options is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("profile", ["TARGET"]),
        ("profile train.py --steps 0", ["--steps", "greater|range"]),
        ("profile train.py --steps many", ["--steps", "many|integer"]),
        ("profile train.py --sort size", ["--sort", "backward"]),
        ("profil model.py", ["profil"]),
    ],
)
def test_usage_in_the_words_of_typer(line: str, words: list[str], seen: Seen, run: Runner) -> None:
    """Its wording differs between versions; what it is about and how it ends do not."""
    ran = run(*line.split())
    first, last = ran.err.splitlines()
    assert all(re.search(word, first) for word in words)
    assert first.startswith("gradscope: error: ")
    assert last == ("Try: gradscope --help" if line.startswith("profil ") else "Try: gradscope profile --help")
    assert (ran.code, ran.out, seen.options) == (2, "", None)


def test_help(seen: Seen, run: Runner) -> None:
    assert run("--help").code == 0
    assert run("-h").out == run("--help").out
    ran = run("profile", "--help")
    assert "[-- ARGS]" in ran.out
    for option in ("--steps", "--warmup", "--json", "--run-to-end", "--min-percent"):
        assert option in ran.out
    bare = run()
    assert bare.code == 2
    assert "doctor" in bare.out


def test_version(seen: Seen, run: Runner) -> None:
    import gradscope

    assert run("--version").out == f"gradscope {gradscope.__version__}\n"
