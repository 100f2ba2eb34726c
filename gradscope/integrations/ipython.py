"""``%%gradscope``: the report of a cell that trains.

``%load_ext gradscope``, then a cell that begins with ``%%gradscope --steps 5``: it runs to its end as it would alone, a
step ends where its optimizer has stepped, and the report is the cell's value.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gradscope.errors import GradscopeError
from gradscope.pipeline import profile_script
from gradscope.report.report import Report
from gradscope.tables import Options
from gradscope.workload import Script


@dataclass(frozen=True)
class _Cell:
    """As a :class:`~gradscope.workload.Script`: what is run, and where its variables are."""

    shell: InteractiveShell
    text: str
    target: str = "cell"

    @property
    def namespace(self) -> dict[str, Any]:
        found: dict[str, Any] = self.shell.user_ns
        return found

    def run(self) -> None:
        # IPython shows an error itself; it is raised here for the report to be of what ran before.
        shell: Any = self.shell  # which has no types
        shell.run_cell(self.text, silent=False).raise_error()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gradscope: {message}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%gradscope", add_help=False)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-lines", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    return parser


def register(shell: InteractiveShell) -> None:
    """Add the magic to a shell."""

    def gradscope(line: str, cell: str) -> Report | None:
        """Profile the training steps of the cell: --steps 5 --warmup 3 --no-lines --no-memory."""
        given = _parser().parse_args(shlex.split(line))
        options = Options(
            steps=given.steps,
            warmup=given.warmup,
            lines=not given.no_lines,
            memory=not given.no_memory,
            run_to_end=True,  # the rest of the notebook wants what the cell makes
        )
        try:
            return profile_script(cast("Script", _Cell(shell, cell)), options).report
        except GradscopeError as error:
            raise UsageError(f"gradscope: {error}") from error

    magics: Any = shell
    magics.register_magic_function(gradscope, magic_kind="cell", magic_name="gradscope")
