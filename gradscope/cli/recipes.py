"""``gradscope recipes``: what there is, what it replaces, what it saves, and its limits."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli.options import Color, ColorOption
from gradscope.cli.streams import reader_may_leave, write_json
from gradscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gradscope.recipes.figures import Figure
    from gradscope.recipes.recipe import Recipe

_NOT_MEASURED = "not measured yet: python benchmarks/recipes.py --only {name} --publish"


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this recipe in full.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    color: ColorOption = Color.auto,
) -> None:
    """List the recipes: what each replaces, what it saves, its limits, and where it runs.

    With NAME, show one in full, with its benchmark results.
    """
    from gradscope.recipes import figures as measured
    from gradscope.recipes.catalogue import all_recipes

    known = {recipe.name: recipe for recipe in all_recipes()}
    chosen = list(known.values()) if name is None else [known[_known(name, known)]]
    figures = {recipe.name: measured.figures_of(recipe.name) for recipe in chosen}
    with reader_may_leave(sys.stdout):
        if as_json:
            records = [
                {**dataclasses.asdict(recipe), "figures": [dataclasses.asdict(row) for row in figures[recipe.name]]}
                for recipe in chosen
            ]
            write_json(
                sys.stdout, json.dumps(records if name is None else records[0], indent=1, ensure_ascii=False) + "\n"
            )
            return
        from gradscope.document.terminal import make_console

        console = make_console(sys.stdout, color.wanted)
        if name is None:
            _print_list(console, chosen)
        else:
            _print_one(console, chosen[0], figures[chosen[0].name])


def _known(name: str, known: Mapping[str, Recipe]) -> str:
    if name in known:
        return name
    by_function = {
        function: recipe.name for recipe in known.values() for function in (*recipe.functions, *recipe.modules)
    }
    if name in by_function:
        return by_function[name]
    near = difflib.get_close_matches(name, [*known, *by_function], n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no recipe {name!r}.\n{meant}gradscope recipes lists them all.")


def _print_list(console: Console, chosen: Sequence[Recipe]) -> None:
    for i, recipe in enumerate(chosen):
        if i:
            console.print()
        _print_title(console, recipe)
        _print_words(console, "replaces", "; ".join(recipe.replaces))
        _print_words(console, "saves", recipe.saves)
        _print_words(console, "limits", " ".join(recipe.limits))
        _print_backends(console, recipe)
    console.print("\nIn full, with benchmark results: gradscope recipes NAME", style="dim", highlight=False)


def _print_one(console: Console, recipe: Recipe, figures: Sequence[Figure]) -> None:
    _print_title(console, recipe)
    console.print(f"\n{_import_line(recipe, console.width)}\n", highlight=False)
    for title, items in (("replaces", recipe.replaces), ("saves", (recipe.saves,)), ("limits", recipe.limits)):
        for i, item in enumerate(items):
            _print_words(console, title if i == 0 else "", item)
    _print_backends(console, recipe)
    for i, source in enumerate(recipe.sources):
        _print_words(console, "sources" if i == 0 else "", source)
    console.print()
    if not figures:
        console.print(_NOT_MEASURED.format(name=recipe.name), style="dim", highlight=False)
        return
    console.print("Forward and backward, compared with what it replaces", style="bold")
    for figure in figures:
        _print_wrapped(console, f"{figure.case}, compared with {figure.baseline}", "  ", "    ")
        leaner = "as much memory" if figure.leaner == "the same" else f"{figure.leaner} memory".strip()
        _print_wrapped(console, f"{figure.faster} ({figure.times}), {leaner} ({figure.sizes})", "    ", "      ")
    for machine in dict.fromkeys(figure.machine for figure in figures):
        _print_wrapped(console, machine, "  ", "    ", style="dim")
    if all(figure.device == "cpu" for figure in figures):
        console.print("  not yet run on a GPU", style="dim")


def _print_backends(console: Console, recipe: Recipe) -> None:
    for i, (backend, where) in enumerate(recipe.backends):
        _print_words(console, "runs on" if i == 0 else "", f"{backend}: {where}")


def _print_title(console: Console, recipe: Recipe) -> None:
    first, *more = textwrap.wrap(recipe.title, console.width - len(recipe.name) - 2, break_on_hyphens=False)
    console.print(recipe.name, style="bold cyan", end="")
    console.print(f"  {first}", highlight=False, soft_wrap=True)
    for line in more:
        console.print(f"{' ' * len(recipe.name)}  {line}", highlight=False, soft_wrap=True)


def _import_line(recipe: Recipe, width: int) -> str:
    names = (*recipe.functions, *recipe.modules)
    line = f"from gradscope.recipes import {', '.join(names)}"
    if len(line) <= width:
        return line
    return "from gradscope.recipes import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _print_wrapped(console: Console, text: str, first: str, rest: str, style: str | None = None) -> None:
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _print_words(console: Console, title: str, text: str) -> None:
    """``text`` in lines below each other, with ``title`` before the first."""
    margin = " " * 12
    lines = textwrap.wrap(text, max(console.width - len(margin), 24), break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        console.print(f"  {title:<10}" if i == 0 else margin, style="dim", end="")
        console.print(line, markup=False, highlight=False, soft_wrap=True)
