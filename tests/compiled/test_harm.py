"""A program that is measured does what it does alone: losses, what is compiled when, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .harm import PROGRAMS
from .test_models import environment

REPOSITORY = Path(__file__).parents[2]


def printed(how: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compiled.harm", how, *PROGRAMS],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def both() -> tuple[list[str], list[str]]:
    return printed("alone"), printed("measured")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_what_it_does_alone(program: str, both: tuple[list[str], list[str]]) -> None:
    alone, measured = ([line for line in lines if line.startswith(f"{program}:")] for lines in both)
    assert len(alone) > 10 and measured == alone
    assert measured[-1] == f"{program}: left []"
