"""Running ``gradscope`` inside the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gradscope.cli import main


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
