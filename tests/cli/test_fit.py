"""``gradscope fit`` on the command line: options, streams, files, messages and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradscope
from gradscope.errors import UsageError, WorkloadError
from gradscope.fitting import FitReport
from gradscope.fitting import run as fitting
from gradscope.fitting.batches import FactorySource, ScaledSource, SizeSource
from gradscope.fitting.options import FitOptions, Reserve
from gradscope.tables import Progress
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fitting.test_document import fitted

MODEL = """
import torch
from torch import nn

def workload():
    return nn.Linear(2, 1), torch.ones(3, 2)

def sized(width="2", batch_size=8):
    return nn.Linear(int(width), 1), torch.ones(batch_size, int(width))

def transposed():
    return nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(5, 4))

def failing(batch_size):
    raise ValueError("out of data")
"""


class Seen:
    """What the command line handed on."""

    source: SizeSource
    settings: FitOptions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("train.py").write_text("print('training')\n")
    yield
    sys.modules.pop("model", None)


@pytest.fixture
def seen(folder: None, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A fit that only notes what it was asked for."""
    seen = Seen()

    def fit_source(source: SizeSource, settings: FitOptions, progress: Progress) -> FitReport:
        seen.source, seen.settings = source, settings
        progress.phase("measuring small batches", 4)
        return FitReport(fitted())

    monkeypatch.setattr(fitting, "fit_source", fit_source)
    return seen


def test_defaults(seen: Seen, run: Runner) -> None:
    ran = run("fit", "model.py", "--batch-sizes", "64,8")
    assert ran.code == 0
    assert seen.settings == FitOptions(batch_sizes=(8, 64))
    assert isinstance(seen.source, ScaledSource)
    assert ran.out == str(FitReport(fitted()))
    assert ran.err == "gradscope: measuring small batches, 4 steps\n"
    assert sorted(path.name for path in Path().iterdir() if path.suffix == ".json") == []


def test_every_option(seen: Seen, run: Runner) -> None:
    options = (
        "--batch-sizes 8 --device-memory 6GiB --reserve 1g --optimizer adamw --measure 2,4,6,12 --device cpu --seed 3"
    )
    assert run("fit", *options.split(), "model.py").code == 0
    assert seen.settings == FitOptions(
        batch_sizes=(8,),
        measured=(2, 4, 6),
        check=12,
        device_memory=6 * 1024**3,
        device_memory_text="6GiB",
        reserve=Reserve(share=seen.settings.reserve.share, fixed=1024**3),
        optimizer="adamw",
        device="cpu",
        seed=3,
    )
    assert seen.settings.reserve.share == 0


def test_a_function_with_batch_size_is_called_with_it(seen: Seen, run: Runner) -> None:
    assert run("fit", "model.py:sized", "--batch-sizes", "8", "--", "5").code == 0
    assert isinstance(seen.source, FactorySource)
    made = seen.source.at(7)
    assert isinstance(made.batch, torch.Tensor)
    assert made.batch.shape == (7, 5)


def test_a_batch_size_given_after_the_dashes_is_fixed(seen: Seen, run: Runner) -> None:
    """``sized("2", "8")``: the parameter is taken, so the batch is scaled; here the user's own call fails."""
    ran = run("fit", "model.py:sized", "--batch-sizes", "8", "--", "2", "8")
    assert ran.code == 1
    assert "TypeError" in ran.err


def test_json_to_a_file(seen: Seen, run: Runner) -> None:
    ran = run("fit", "model.py", "--batch-sizes", "8", "--json", "fit.json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(Path("fit.json").read_text())["largest"] == 40
    ran = run("fit", "model.py", "--batch-sizes", "8", "--json", "fit.json")
    assert ran.err.endswith("gradscope: wrote fit.json\n")


def test_json_to_stdout_alone(seen: Seen, run: Runner) -> None:
    Path("noisy.py").write_text(MODEL + "print('imported')\n")
    ran = run("fit", "noisy.py", "--batch-sizes", "8", "--json", "-", "-q")
    sys.modules.pop("noisy", None)
    assert json.loads(ran.out)["schema_version"] == 1
    assert ran.err == "imported\n"


def test_a_file_of_somebody_elses_is_kept(seen: Seen, run: Runner) -> None:
    Path("mine.json").write_text("{}")
    ran = run("fit", "model.py", "--batch-sizes", "8", "--json", "mine.json")
    assert ran.code == 2
    assert ran.err.startswith("gradscope: error: mine.json exists and was not written by gradscope.")
    assert not hasattr(seen, "settings")
    assert run("fit", "model.py", "--batch-sizes", "8", "--json", "mine.json", "--force").code == 0


def test_color(seen: Seen, run: Runner) -> None:
    assert "\x1b[" in run("fit", "model.py", "--batch-sizes", "8", "--color", "always").out


# --------------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("train.py", "--batch-sizes", "8"),
            "train.py is a training script, which makes its batches itself: gradscope cannot change their size.\n"
            "Write a model file beside it that imports its model, and fit that:\n"
            "    def workload(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)",
        ),
        (
            ("model.py:transposed", "--batch-sizes", "8"),
            "the batch cannot be resized: its tensors do not share a first dimension (batch[0] 3 x 2, "
            "batch[1] 5 x 4).\n"
            "Let model.py create it, with batch_size samples:\n"
            "    def transposed(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)",
        ),
        (
            ("model.py", "--batch-sizes", "8,big"),
            "--batch-sizes: big is not a batch size.\nGive whole numbers from 1, with commas between: 8,16,32",
        ),
        (
            ("model.py", "--batch-sizes", "8", "--device-memory", "lots"),
            "--device-memory: lots is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes.",
        ),
        (
            ("gone.py", "--batch-sizes", "8"),
            "there is no file gone.py.\nDid you mean model.py?",
        ),
        (("model.py",), "Missing option '--batch-sizes'.\nTry: gradscope fit --help"),
    ],
)
def test_what_cannot_be_used(folder: None, run: Runner, arguments: tuple[str, ...], message: str) -> None:
    ran = run("fit", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"gradscope: error: {message}\n"


def test_the_users_own_error(folder: None, run: Runner) -> None:
    ran = run("fit", "model.py:failing", "--batch-sizes", "8", "-q")
    assert ran.code == 1
    assert ran.err.endswith("ValueError: out of data\n")
    assert "fitting" not in ran.err


# --------------------------------------------------------------------------------------------------------------------
# From Python
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (torch.nn.Linear, None),
            "the first argument is the class Linear.\n"
            "Give a model, a gradscope.Workload, or a function that has a parameter batch_size.",
        ),
        (
            (lambda batch_size: None, torch.ones(2)),
            "a function that creates the workload also gives its batch, loss and optimizer: omit them.",
        ),
    ],
)
def test_what_fit_cannot_use(given: tuple[Any, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        gradscope.fit(*given, batch_sizes=8)
    assert str(raised.value) == message


def test_a_function_that_returns_no_workload() -> None:
    with pytest.raises(WorkloadError, match=r"^workload\(batch_size=2\) returned None \(is a return missing\?\)\."):
        gradscope.fit(lambda batch_size: None, batch_sizes=8)


def test_public_names() -> None:
    assert callable(gradscope.fit)
    assert gradscope.FitReport is FitReport
    assert {"fit", "FitReport"} <= set(dir(gradscope))


def test_memory_budget(seen: Seen, run: Runner) -> None:
    """By option, else by pyproject.toml, else the default."""
    assert run("fit", "model.py", "--batch-sizes", "8").code == 0
    assert seen.settings.memory_budget == 4 * 1024**3
    Path("pyproject.toml").write_text('[tool.gradscope]\nmemory-budget = "2GiB"\n')
    assert run("fit", "model.py", "--batch-sizes", "8").code == 0
    assert seen.settings.memory_budget == 2 * 1024**3
    assert run("fit", "model.py", "--batch-sizes", "8", "--memory-budget", "1g").code == 0
    assert seen.settings.memory_budget == 1024**3
