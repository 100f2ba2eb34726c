"""Options that several commands share, and reading the command line of one that runs a TARGET."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from gradscope.cli.streams import beside
from gradscope.errors import UsageError
from gradscope.safe_text import local_path

if TYPE_CHECKING:
    from gradscope.workload import Factory, Script, Workload

Loaded = TypeVar("Loaded", bound="Factory | Script | Workload")


class Sort(str, Enum):
    """Order of layers in a report."""

    backward = "backward"
    forward = "forward"
    ratio = "ratio"
    memory = "memory"


class Color(str, Enum):
    """When to colour the report."""

    auto = "auto"
    always = "always"
    never = "never"

    @property
    def wanted(self) -> bool | None:
        """None: where it is read on a terminal."""
        return {"auto": None, "always": True, "never": False}[self.value]


_REPORT = "Report"

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="model.py, model.py:name, package.module:name, or a training script."),
]
ModuleOption = Annotated[
    bool, typer.Option("-m", "--module", help="TARGET is a module to run as a script, as with python -m.")
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps to measure.")]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, help="Warm-up steps, not measured.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Device for a model file: auto, cpu or cuda.")]


def _seed_for_torch(seed: int | None) -> int | None:
    from gradscope.tables.options import check_seed

    check_seed(seed)
    return seed


SeedOption = Annotated[
    int | None, typer.Option("--seed", callback=_seed_for_torch, help="Seed for Python, NumPy and torch.")
]
NoLinesOption = Annotated[bool, typer.Option("--no-lines", help="Do not attribute time to source lines.")]
NoMemoryOption = Annotated[bool, typer.Option("--no-memory", help="Do not measure memory.")]
NoHtmlOption = Annotated[bool, typer.Option("--no-html", help="Do not write the HTML page.")]
NoSourceOption = Annotated[bool, typer.Option("--no-source", help="Leave source code out of the HTML page.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print progress on stderr.")]
DepthOption = Annotated[
    int | None,
    typer.Option("--depth", min=0, help="Levels of the layer tree to show; all by default.", rich_help_panel=_REPORT),
]
SortOption = Annotated[
    Sort | None,
    typer.Option("--sort", help="Sort layers by this; backward by default.", rich_help_panel=_REPORT),
]
TopOption = Annotated[
    int | None,
    typer.Option("--top", min=1, help="Show only this many layers, the most expensive.", rich_help_panel=_REPORT),
]
MinPercentOption = Annotated[
    float | None,
    typer.Option(
        "--min-percent",
        min=0,
        max=100,
        help="Collapse layers below this percentage of backward time; 1 by default.",
        rich_help_panel=_REPORT,
    ),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Every table, and every finding in full.", rich_help_panel=_REPORT)
]
ShowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--show",
        metavar="SECTION,...",
        help="These in full too: findings, layers, lines, ops, kernels, ledger, device, buckets, memory, saved, "
        "retained, held, copies.",
        rich_help_panel=_REPORT,
    ),
]
ColorOption = Annotated[Color, typer.Option("--color", help="Colour the output.", rich_help_panel=_REPORT)]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="RULE,...",
        help="Leave out findings of these rules (gradscope rules lists them). May be repeated.",
        rich_help_panel=_REPORT,
    ),
]
MemoryBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        metavar="AMOUNT",
        help="Most memory that recording one pass may take; 4GiB by default. Larger steps are measured in part.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite files that gradscope did not write.")]


def view_options(
    depth: int | None,
    sort: Sort | None,
    top: int | None,
    min_percent: float | None,
    full: bool = False,
    show: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The options that were given, as keyword arguments of ``Report.print``: the report chooses the others.

    Raises:
        UsageError: ``show`` names a section that there is not.
    """
    sections = tuple(stripped for text in show or () for name in text.split(",") if (stripped := name.strip()))
    if sections:
        from gradscope.report.tree import ViewOptions

        ViewOptions(show=sections)
    given = {
        "full": full or None,
        "show": sections or None,
        "depth": depth,
        "sort": sort.value if sort is not None else None,
        "top": top,
        "min_percent": min_percent,
    }
    return {name: value for name, value in given.items() if value is not None}


def ignored_rules(given: Sequence[str] | None, folder: Path | None = None) -> tuple[str, ...]:
    """The rules that ``--ignore`` names, and those of [tool.gradscope] in the nearest pyproject.toml.

    Args:
        given: as on the command line, each a name or several with commas.
        folder: where the search for the file begins; the working folder by default.

    Raises:
        UsageError: a rule is named that there is not, or the file cannot be used.
    """
    from gradscope.config import find_config, working_folder

    names = [stripped for text in given or () for name in text.split(",") if (stripped := name.strip())]
    config = find_config(folder or working_folder())
    _require_known(names, "--ignore")
    _require_known(config.ignore, config.name("ignore"))
    return tuple(dict.fromkeys((*names, *config.ignore)))


def memory_budget(given: str | None, folder: Path | None = None) -> int:
    """Bytes of ``--memory-budget``, else of [tool.gradscope] in the nearest pyproject.toml, else the default.

    Args:
        given: as on the command line.
        folder: where the search for the file begins; the working folder by default.

    Raises:
        UsageError: it is not an amount of memory, or the file cannot be used.
    """
    from gradscope.config import find_config, working_folder
    from gradscope.tables import Options
    from gradscope.units import bytes_of

    if given is not None:
        return bytes_of(given, "--memory-budget")
    config = find_config(folder or working_folder())
    if config.memory_budget is None:
        return Options().memory_budget
    return bytes_of(config.memory_budget, config.name("memory-budget"))


def _require_known(names: Sequence[str], where: str) -> None:
    if not names:
        return
    from gradscope.diagnose.engine import require_known
    from gradscope.errors import UsageError

    try:
        require_known(names)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


SCRIPT_ARGS = "gradscope.args"  # of the context: what follows --


class TargetCommand(TyperCommand):
    """A command whose arguments after ``--`` belong to the target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what is before ``--``; what is after it goes into ``ctx.meta`` untouched."""
        own, after = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[SCRIPT_ARGS] = after
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with the one that the parser does not know of."""
        return [*usage_pieces(self), "[-- ARGS]..."]


def usage_pieces(command: TyperCommand) -> list[str]:
    """Return ``[OPTIONS]`` and the command's arguments, those that may be left out in brackets."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    names = [(one.metavar or str(one.name).upper(), one.required) for one in arguments]
    return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]


def json_path_of(target: str, output: str | None, json_path: str | None, *, module: bool) -> Path | None:
    """Where RUN.json goes; None for stdout."""
    if json_path is not None:
        if output is not None:
            raise UsageError("-o and --json both say where RUN.json goes: give one of them.")
        return None if json_path == "-" else Path(local_path(json_path))
    if output is not None and not os.path.basename(output):
        raise UsageError(
            f"-o {output or repr(output)} does not name a file.\n"
            f"Give the beginning of a name, such as {os.path.join(output, 'run')}."
        )
    prefix = output if output is not None else f"gradscope-{_stem(target, module=module)}"
    return Path(local_path(prefix if prefix.endswith(".json") else f"{prefix}.json"))


def of_rank(path: Path, rank: int) -> Path:
    """``run.rank3.json`` for ``run.json``: ranks of one program write beside each other; a device is left as it is."""
    if path.exists() and not path.is_file():
        return path
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def shown_target(target: str, *, module: bool = False) -> str:
    """Return TARGET as the report names its file: from the working folder where it is below that, else in full."""
    file, name = (target, "") if os.path.exists(target) else target.rpartition(":")[::2]
    if module or not os.path.isfile(file):
        return target
    local = local_path(file)
    if os.path.isabs(local) or local.startswith(os.pardir):
        local = os.path.join(os.path.realpath(os.path.dirname(file)), os.path.basename(file))
    return f"{local}:{name}" if name else local


def renamed(loaded: Loaded, target: str) -> Loaded:
    """Return what was loaded from a TARGET, named ``target`` in reports and messages."""
    from gradscope.workload import Workload

    if isinstance(loaded, Workload):
        loaded.target = target
        return loaded
    return dataclasses.replace(loaded, target=target)


def html_path_of(json_path: Path | None, html_path: str | None, *, no_html: bool) -> Path | None:
    """Where the page goes: beside RUN.json, and nowhere if that goes to stdout."""
    if html_path is not None:
        if no_html:
            raise UsageError("--html and --no-html contradict each other: give one of them.")
        if html_path == "-":
            raise UsageError("--html writes a file: give its path, or write the page later with gradscope show.")
        return Path(local_path(html_path))
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


_LAUNCHERS = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torchrun": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate": "accelerate launch",
    "deepspeed": "deepspeed",
}


def refuse_launcher(target: str, args: Sequence[str], *, module: bool, command: str) -> None:
    """Refuse a program that starts the training in other processes, and say how to profile those."""
    name = target if module else os.path.basename(target)
    launcher = _LAUNCHERS.get(name)
    if launcher is None or (not module and os.path.splitext(name)[1]):
        return
    given = list(args[1:] if args[:1] == ["launch"] else args)
    begins = next((i for i, one in enumerate(given) if one == "-m" or one.endswith(".py")), len(given))
    before, training = given[:begins], given[begins:] or ["train.py"]
    head = 2 if training[0] == "-m" else 1
    rest = ["--", *training[head:]] if training[head:] else []
    words = [*launcher.split(), *before, "-m", "gradscope", command, *training[:head], *rest]
    raise UsageError(
        f"{name} starts the training in processes of their own, and gradscope measures the one that it runs in.\n"
        f"Let it start gradscope: {shlex.join(words)}"
    )


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
