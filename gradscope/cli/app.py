"""The program ``gradscope``: its commands, and how it ends."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gradscope.cli.check import check
from gradscope.cli.diff import diff
from gradscope.cli.doctor import doctor
from gradscope.cli.failure import INTERRUPTED, TERMINATED, begin, raising_on_terminate, say_ended, say_error
from gradscope.cli.fit import fit
from gradscope.cli.fix import fix
from gradscope.cli.merge import merge
from gradscope.cli.options import TargetCommand, usage_pieces
from gradscope.cli.profile import profile
from gradscope.cli.recipes import recipes
from gradscope.cli.rules import rules
from gradscope.cli.show import show
from gradscope.cli.streams import keep_streams, reopen_closed_streams, silence
from gradscope.cli.trace import trace
from gradscope.errors import GradscopeError, Terminated


class Command(TyperCommand):
    """A command whose usage line names its arguments as the help does: ``RUN.json``, ``[NAME]``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; typer would write {RUN.json}."""
        return usage_pieces(self)


class Program(TyperGroup):
    """The commands; Ctrl-C and SIGTERM end each with a word, where typer ends it with a code alone, or a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command and return its exit code."""
        begin()
        try:
            with raising_on_terminate():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say_ended("interrupted")
            return INTERRUPTED
        except Terminated:  # where no code of the user's ran, as while a trace is read
            say_ended("terminated")
            return TERMINATED


app = typer.Typer(
    name="gradscope",
    cls=Program,
    help="Find where the backward pass of a PyTorch model spends time and memory, and swap in verified faster ops.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    "profile",
    cls=TargetCommand,
    # What we do not know is most likely meant for the script: collected, then refused with a hint.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(profile)
app.command(
    "fix",
    cls=TargetCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},  # as of profile
)(fix)
app.command("fit", cls=TargetCommand)(fit)
app.command("show", cls=Command)(show)
app.command("trace", cls=Command)(trace)
app.command("diff", cls=Command)(diff)
app.command("merge", cls=Command)(merge)
app.command("check", cls=Command)(check)
app.command("recipes", cls=Command)(recipes)
app.command("rules", cls=Command)(rules)
app.command("doctor", cls=Command)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        import gradscope

        typer.echo(f"gradscope {gradscope.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(GradscopeError.exit_code)


def program() -> Any:
    """Build the program, with help that shows every bracket: rich would take [tool.gradscope] for a style."""
    built: Any = typer.main.get_command(app)
    for command in (built, *built.commands.values()):
        if command.rich_markup_mode == "rich":
            for one in (command, *command.params):
                if getattr(one, "help", None):
                    one.help = one.help.replace("[", r"\[")
    return built


def run(arguments: list[str]) -> int:
    """Run ``gradscope ARGUMENTS`` and return its exit code."""
    reopen_closed_streams()
    keep_streams()
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        code = code or _unwritable(error)
    except Exception:  # a stream of the user's own, without a flush or with one that raises
        pass
    return code


# Of writing: a full disk or quota, a file that is too large, a device or descriptor that is gone.
_WRITING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF))

# Of opening: this process, or the system, has as many files open as it may.
_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))
_NO_DESCRIPTORS = (
    "too many files are open: gradscope can open none of its own.\nClose some, or raise the limit: ulimit -n"
)


def _unwritable(error: OSError) -> int:
    silence(sys.stdout)
    say_error(f"stdout cannot be written: {error.strerror or error}.\nSend it to a file or a pipe that takes it.")
    return GradscopeError.exit_code


def _run(arguments: list[str]) -> int:
    command = program()
    try:
        # obj=True: this process is ours to its end, see report_stream.
        code = command.main(args=arguments, prog_name="gradscope", standalone_mode=False, obj=True)
    except GradscopeError as error:
        say_error(str(error))
        return error.exit_code
    except _CommandLineError as error:
        say_error(_usage_message(error))
        return GradscopeError.exit_code
    except typer.Abort:
        return INTERRUPTED
    except OSError as error:
        if error.errno in _DESCRIPTORS:
            say_error(_NO_DESCRIPTORS)
            return GradscopeError.exit_code
        if error.errno not in _WRITING:
            raise
        return _unwritable(error)
    return code if isinstance(code, int) else 0


# The base of every complaint about the command line. typer brings its own copy of click or uses the installed one,
# depending on its version; either way its public BadParameter descends from it.
_CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def _usage_message(error: Exception) -> str:
    described = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "gradscope"
    described = described.replace("Value error, ", "")  # of the library that typer checks values with
    return f"{described}\nTry: {command} --help"
