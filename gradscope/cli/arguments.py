"""Reading the command line of a command that runs a TARGET."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from gradscope.cli.page import beside
from gradscope.errors import UsageError

SCRIPT_ARGS = "gradscope.args"  # of the context: what follows --


class TargetCommand(TyperCommand):
    """A command whose arguments after ``--`` belong to the target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is before ``--``; what is after it goes into ``ctx.meta`` untouched."""
        own, after = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[SCRIPT_ARGS] = after
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line with the part that the parser does not know of."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]..."]


def json_path_of(target: str, output: str | None, json_path: str | None, *, module: bool) -> Path | None:
    """Where RUN.json goes; None for stdout."""
    if json_path is not None:
        if output is not None:
            raise UsageError("-o and --json both say where RUN.json goes: give one of them.")
        return None if json_path == "-" else Path(json_path)
    if output is not None and not os.path.basename(output):
        raise UsageError(
            f"-o {output or repr(output)} does not name a file.\n"
            f"Give the beginning of a name, such as {os.path.join(output, 'run')}."
        )
    prefix = output if output is not None else f"gradscope-{_stem(target, module=module)}"
    return Path(prefix if prefix.endswith(".json") else f"{prefix}.json")


def html_path_of(json_path: Path | None, html_path: str | None, *, no_html: bool) -> Path | None:
    """Where the page goes: beside RUN.json, and nowhere if that goes to stdout."""
    if html_path is not None:
        if no_html:
            raise UsageError("--html and --no-html contradict each other: give one of them.")
        if html_path == "-":
            raise UsageError("--html writes a file: give its path, or write the page later with gradscope show.")
        return Path(html_path)
    if no_html or json_path is None:
        return None
    return beside(json_path)


def _stem(target: str, *, module: bool) -> str:
    """``gpt`` for ``examples/gpt.py``, ``gpt.py:small``, ``models.gpt:small`` and ``-m models.gpt``."""
    path = Path(target)
    if not os.path.exists(path):  # Path.exists() raises where a name is too long, or a folder closed to us
        path = Path(target.rpartition(":")[0] or target)
    if path.suffix == ".py" or os.path.exists(path):
        return path.stem
    return path.name.rpartition(".")[2]


def refuse_leftovers(context: typer.Context, target: str, module: bool) -> None:
    """Refuse what is left on the command line, meant for the script or misspelled, and say how to write it."""
    leftovers: Sequence[str] = context.args
    if target.startswith("-"):  # unknown options come first where there is no target
        raise UsageError(
            f"{context.command_path} has no option {target}{_guess(context, target)}\nTry: {_help(context)}"
        )
    if not leftovers:
        return
    first = leftovers[0].partition("=")[0]
    after = shlex.join([*leftovers, *context.meta.get(SCRIPT_ARGS, ())])
    command = f"{context.command_path} {'-m ' if module else ''}{shlex.quote(target)} -- {after}"
    if first.startswith("-"):
        raise UsageError(
            f"{context.command_path} has no option {first}{_guess(context, first)}\n"
            f"Options of the script itself go after '--': {command}"
        )
    raise UsageError(f"unexpected argument {first}.\nArguments of the script itself go after '--': {command}")


def _guess(context: typer.Context, option: str) -> str:
    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    close = difflib.get_close_matches(option.partition("=")[0], known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else "."


def _help(context: typer.Context) -> str:
    return f"{context.command_path} --help"
