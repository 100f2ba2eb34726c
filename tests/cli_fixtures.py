"""Running ``gradscope`` inside the test's own process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import gradscope.kernels
import gradscope.recipes
from gradscope.cli import main

_OURS = tuple(Path(package.__file__).parent for package in (gradscope, gradscope.recipes, gradscope.kernels))


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


Runner = Callable[..., Ran]


@pytest.fixture(name="run")
def run_fixture(capsys: pytest.CaptureFixture[str]) -> Runner:
    """Run ``gradscope ARGUMENTS``."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert isinstance(ended.value.code, int)
        captured = capsys.readouterr()
        return Ran(ended.value.code, captured.out, captured.err)

    return run


def frames_of_ours(traceback: str) -> list[str]:
    """Files of a printed traceback that are gradscope's own, wherever it was cloned to."""
    named = re.findall(r'File "([^"]+)", line', traceback)
    return [name for name in named if any(Path(name).is_relative_to(folder) for folder in _OURS)]
