"""``%%gradscope``: the report of a cell that trains.

``%load_ext gradscope``, then a cell that begins with ``%%gradscope --steps 5``: it runs to its end as it would alone, a
step ends where its optimizer has stepped, and the report is the cell's value. A cell that fails does so here too, below
the report of what ran before.
"""

from __future__ import annotations

import argparse
import ast
import shlex
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from gradscope.errors import GradscopeError
from gradscope.pipeline import profile_script
from gradscope.report.report import Report
from gradscope.tables import Options
from gradscope.workload import Script, cut_own_frames


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
        """As ``%%time``: an error comes out once, and what the last line is worth is shown."""
        shell: Any = self.shell  # which has no types
        text = shell.transform_cell(self.text)
        name = shell.compile.cache(text, shell.execution_count, raw_code=self.text)
        tree = shell.transform_ast(shell.compile.ast_parse(text, name))
        shown = tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_silently(text)
        last = [tree.body.pop()] if shown else []
        exec(shell.compile(tree, name, "exec"), shell.user_ns)  # noqa: S102 (running the user's cell is the purpose)
        exec(shell.compile(ast.Interactive(last), name, "single"), shell.user_ns)  # noqa: S102 (as above)


def _ends_silently(text: str) -> bool:
    """Check that a semicolon is its last token: so a notebook hides what the last line is worth."""
    return bool(DisplayHook.semicolon_at_end_of_expression(text))  # type: ignore[no-untyped-call]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gradscope: {message}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%gradscope", description="Profile the training steps of the cell.", add_help=False)
    parser.add_argument("--steps", type=int, default=5, help="measured steps (5)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before anything is measured (3)")
    parser.add_argument("--no-lines", action="store_true", help="do not measure by source line")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("-h", "--help", action="store_true", help="show this, and do not run the cell")
    return parser


def _given(line: str) -> argparse.Namespace:
    try:
        return _parser().parse_args(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"%%gradscope: {str(error).lower()} in: {line}") from error


def register(shell: InteractiveShell) -> None:
    """Add the magic to a shell."""

    def gradscope(line: str, cell: str) -> Report | None:
        """Profile the training steps of the cell: --steps 5 --warmup 3 --no-lines --no-memory."""
        given = _given(line)
        if given.help:
            _parser().print_help()
            return None
        try:
            options = Options(
                steps=given.steps,
                warmup=given.warmup,
                lines=not given.no_lines,
                memory=not given.no_memory,
                run_to_end=True,  # the rest of the notebook wants what the cell makes
            )
            outcome = profile_script(cast("Script", _Cell(shell, cell)), options)
        except GradscopeError as error:
            raise UsageError(f"gradscope: {error}") from error
        if outcome.error is None:
            return outcome.report
        if outcome.report is not None:
            display(outcome.report)  # type: ignore[no-untyped-call]
        raise cut_own_frames(outcome.error)

    magics: Any = shell
    magics.register_magic_function(gradscope, magic_kind="cell", magic_name="gradscope")
