"""``gradscope rules``: what is looked for in a run, and each rule in full."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli.options import Color, ColorOption
from gradscope.cli.streams import reader_may_leave
from gradscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gradscope.diagnose.case import Rule

# Words that begin a sentence of a rule's text and say what it is about.
_LABELS = ("Pattern:", "Evidence:", "Estimate:", "Floor:", "Source:", "Sources:")
_NARROWEST = 24
_LONGEST_NAME = 60  # of a rule that there is not, in the message


def rules(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this rule in full.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the list as a Markdown table.")] = False,
    color: ColorOption = Color.auto,
) -> None:
    """List the rules behind the findings: what each looks for in a run.

    With NAME, show one in full: an example, what counts as evidence, how the
    saving is estimated, and the source of the method.
    """
    from gradscope.diagnose.engine import every_rule

    known = {rule.name: rule for rule in every_rule()}
    if name is not None and markdown:
        raise UsageError("--markdown prints the whole list: leave out NAME.")
    chosen = None if name is None else _known(name, known)
    with reader_may_leave(sys.stdout):
        if markdown:
            sys.stdout.write(rules_markdown(known.values()))
            return
        from gradscope.document.terminal import make_console

        console = make_console(sys.stdout, color.wanted)
        if chosen is None:
            _print_list(console, list(known.values()))
        else:
            _print_one(console, known[chosen])


def rules_markdown(chosen: Iterable[Rule]) -> str:
    """The table of rules in docs/findings.md."""
    rows = [f"| `{rule.name}` | {rule.title} |" for rule in chosen]
    return "\n".join(["| rule | what it finds |", "|---|---|", *rows]) + "\n"


def floor_text(rule: Rule) -> str:
    """The least that a finding of the rule must be worth, in a sentence or two."""
    text = f"Floor: {rule.floor.text()}; less is not said."
    if rule.beyond_numbers:
        text += " What the rule says beside its savings is said in any case."
    if rule.of_times:
        text += " Not looked for where the steps of a run are too unsteady."
    return text


def _known(name: str, known: Iterable[str]) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, list(known), n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    raise UsageError(f"there is no rule {shown!r}.\n{meant}gradscope rules lists them all.")


def _print_list(console: Console, chosen: Sequence[Rule]) -> None:
    pad = max((len(rule.name) for rule in chosen), default=0) + 2
    below = console.width - pad < _NARROWEST  # titles on lines of their own
    for rule in chosen:
        console.print(rule.name if below else rule.name.ljust(pad), style="bold cyan", end="\n" if below else "")
        room = max(console.width - (4 if below else pad), _NARROWEST)
        for i, line in enumerate(textwrap.wrap(rule.title, room, break_on_hyphens=False)):
            margin = "    " if below else " " * pad if i else ""
            _print_line(console, f"{margin}{line}")
    console.print("\nIn full: gradscope rules NAME", style="dim", highlight=False)


def _print_one(console: Console, rule: Rule) -> None:
    console.print(rule.name, style="bold cyan", end="")
    lines = textwrap.wrap(rule.title, max(console.width - len(rule.name) - 2, _NARROWEST), break_on_hyphens=False)
    for i, line in enumerate(lines):
        _print_line(console, f"  {line}" if not i else f"{' ' * len(rule.name)}  {line}")
    for kind, block in (*_blocks(rule.about), ("text", floor_text(rule))):
        console.print()
        if kind == "code":
            for line in block.splitlines():
                _print_line(console, f"    {line}", style="cyan")
        else:
            _print_text(console, block)
    console.print("\nTo turn it off: --ignore " + rule.name, style="dim", highlight=False, soft_wrap=True)
    console.print(f'or for a project, in pyproject.toml: [tool.gradscope] ignore = ["{rule.name}"]',
                  style="dim", markup=False, highlight=False, soft_wrap=True)  # fmt: skip


def _blocks(about: str) -> Iterator[tuple[str, str]]:
    """("text" or "code", block) of a docstring; each labelled sentence is a text of its own."""
    head, _, rest = about.partition("\n")
    text = f"{head.strip()}\n{textwrap.dedent(rest)}".replace("``", "")
    code: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            code.append(textwrap.dedent(block).strip("\n"))
            continue
        if code:
            yield "code", "\n\n".join(code)
            code = []
        flat = " ".join(block.split()).replace("::", ":")
        for label in _LABELS:
            flat = flat.replace(f" {label}", f"\n{label}")
        yield from (("text", sentence) for sentence in flat.splitlines())
    if code:
        yield "code", "\n\n".join(code)


def _print_text(console: Console, text: str) -> None:
    label = next((label for label in _LABELS if text.startswith(label)), "")
    lines = textwrap.wrap(text, max(console.width, _NARROWEST), break_on_hyphens=False, break_long_words=False)
    for i, line in enumerate(lines):
        if label and i == 0:
            console.print(label, style="bold", end="")
            line = line.removeprefix(label)
        _print_line(console, line)


def _print_line(console: Console, line: str, style: str | None = None) -> None:
    from gradscope.document.glyphs import for_encoding

    console.print(for_encoding(console.encoding).text(line), style=style, markup=False, highlight=False, soft_wrap=True)
