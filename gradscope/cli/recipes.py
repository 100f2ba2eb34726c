"""``gradscope recipes``: what there is, what it replaces, what it saves, and its limits."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope import units
from gradscope.cli.options import Color, ColorOption
from gradscope.cli.streams import reader_may_leave
from gradscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gradscope.recipes.recipe import Recipe

_NOT_MEASURED = "not measured yet: python benchmarks/recipes.py --only {name} --publish"


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One recipe, in full.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    color: ColorOption = Color.auto,
) -> None:
    """List the recipes: what each replaces, what it saves, its limits, and where it was measured.

    With NAME, one of them in full, with its figures.
    """
    from gradscope.recipes.catalogue import all_recipes, figures_of

    known = {recipe.name: recipe for recipe in all_recipes()}
    chosen = list(known.values()) if name is None else [known[_known(name, known)]]
    figures = {recipe.name: figures_of(recipe.name) for recipe in chosen}
    with reader_may_leave(sys.stdout):
        if as_json:
            records = [{**dataclasses.asdict(recipe), "figures": figures[recipe.name]} for recipe in chosen]
            sys.stdout.write(json.dumps(records if name is None else records[0], indent=1, ensure_ascii=False) + "\n")
            return
        from gradscope.report.terminal import make_console

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
        console.print(recipe.name, style="bold cyan", end="")
        console.print(f"  {recipe.title}", highlight=False)
        _print_words(console, "replaces", "; ".join(recipe.replaces))
        _print_words(console, "saves", recipe.saves)
        _print_words(console, "limits", " ".join(recipe.limits))
        _print_words(console, "runs on", "; ".join(f"{backend}: {where}" for backend, where in recipe.backends))
    console.print("\nIn full, with figures: gradscope recipes NAME", style="dim", highlight=False)


def _print_one(console: Console, recipe: Recipe, figures: Sequence[Mapping[str, Any]]) -> None:
    console.print(recipe.name, style="bold cyan", end="")
    console.print(f"  {recipe.title}\n", highlight=False)
    console.print(f"from gradscope.recipes import {', '.join((*recipe.functions, *recipe.modules))}\n", highlight=False)
    for title, items in (("replaces", recipe.replaces), ("saves", (recipe.saves,)), ("limits", recipe.limits)):
        for i, item in enumerate(items):
            _print_words(console, title if i == 0 else "", item)
    for i, (backend, where) in enumerate(recipe.backends):
        _print_words(console, "runs on" if i == 0 else "", f"{backend}: {where}")
    for i, source in enumerate(recipe.sources):
        _print_words(console, "sources" if i == 0 else "", source)
    console.print()
    if not figures:
        console.print(_NOT_MEASURED.format(name=recipe.name), style="dim", highlight=False)
        return
    console.print("Forward and backward, beside what it replaces", style="bold")
    for row in figures:
        console.print(f"  {row['case']}, beside {row['baseline']}", highlight=False, soft_wrap=True)
        console.print(f"    {_ratios(row)}", highlight=False, soft_wrap=True)
    for machine in dict.fromkeys(_machine(row) for row in figures):
        console.print(f"  {machine}", style="dim", highlight=False, soft_wrap=True)


def _ratios(row: Mapping[str, Any]) -> str:
    time = f"{_factor(row['baseline_ms'] / row['recipe_ms'], 'faster', 'slower')}"
    times = f"{units.ns(row['baseline_ms'] * 1e6)} → {units.ns(row['recipe_ms'] * 1e6)}"
    before, after = int(row["baseline_bytes"]), int(row["recipe_bytes"])
    memory = f"{_factor(before / after, 'less memory', 'more memory')}" if after > 0 and before > 0 else "memory"
    return f"{time} ({times}), {memory} ({units.size(before)} → {units.size(after)})"


def _factor(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.2f}× {better}" if ratio >= 1 else f"{1 / ratio:.2f}× {worse}"


def _machine(row: Mapping[str, Any]) -> str:
    threads = f", {row['threads']} threads" if row["device"] == "cpu" else ""
    return f"{row['device_name']}{threads}, torch {row['torch']}, {str(row['time'])[:10]}"


def _print_words(console: Console, title: str, text: str) -> None:
    """``text`` in lines below each other, with ``title`` before the first."""
    margin = " " * 12
    lines = textwrap.wrap(text, max(console.width - len(margin), 24), break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        console.print(f"  {title:<10}" if i == 0 else margin, style="dim", end="")
        console.print(line, markup=False, highlight=False, soft_wrap=True)
