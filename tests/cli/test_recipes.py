"""``gradscope recipes``: the list, one recipe in full, JSON, and names that there are not."""

from __future__ import annotations

import dataclasses
import json

import pytest

import gradscope.recipes
from gradscope.cli import app as program
from gradscope.cli import recipes as command
from gradscope.recipes import catalogue, figures

RECIPES = catalogue.all_recipes()

FIGURES = [figures.Figure(**row) for row in [
    {
        "recipe": "gelu", "case": "N8", "baseline": "gelu by hand", "device": "cpu", "device_name": "A chip",
        "threads": 2, "torch": "2.13.0", "time": "2026-11-21T10:00:00Z", "baseline_ms": 30.0, "recipe_ms": 12.0,
        "lowest": 2.4, "highest": 2.6, "baseline_bytes": 4_000_000, "recipe_bytes": 1_000_000,
    },
    {
        "recipe": "gelu", "case": "N9", "baseline": "F.gelu", "device": "cuda", "device_name": "A card", "threads": 2,
        "torch": "2.13.0", "time": "2026-11-20T10:00:00Z", "baseline_ms": 1.0, "recipe_ms": 1.25, "lowest": 0.8,
        "highest": 0.8, "baseline_bytes": 1_000, "recipe_bytes": 0,
    },
]]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program._run(["recipes", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_every_recipe_says_all_that_is_asked_of_it() -> None:
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES) == 11
    for recipe in RECIPES:
        assert recipe.title[0].isupper() and not recipe.title.endswith("."), recipe.name
        for name in (*recipe.functions, *recipe.modules):
            assert name in gradscope.recipes.__all__, name
            assert callable(getattr(gradscope.recipes, name)), name
        assert recipe.functions and recipe.replaces and recipe.saves and recipe.limits and recipe.backends


def test_every_public_name_belongs_to_a_recipe() -> None:
    named = {name for recipe in RECIPES for name in (*recipe.functions, *recipe.modules)}
    assert named == set(gradscope.recipes.__all__)


def test_every_recipe_has_a_page(request: pytest.FixtureRequest) -> None:
    folder = request.config.rootpath / "docs" / "recipes"
    assert {path.stem for path in folder.glob("*.md")} == {recipe.name for recipe in RECIPES}


def test_the_list_names_each_with_what_it_replaces_and_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    for recipe in RECIPES:
        assert f"{recipe.name} {recipe.title}" in flat
        assert " ".join("; ".join(recipe.replaces).split()) in flat
        assert " ".join(" ".join(recipe.limits).split()) in flat
    assert all(line == line.rstrip() for line in out.splitlines())


def test_one_recipe_in_full_with_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "figures_of", lambda name: FIGURES)
    code, out, _ = run(capsys, "gelu")
    assert code == 0
    assert "from gradscope.recipes import gelu, bias_gelu" in out
    assert "N8, compared with gelu by hand" in out
    assert "2.50× faster (30.0 ms → 12.0 ms), 4.00× less memory (4.00 MB → 1.00 MB)" in out
    assert "1.25× slower (1.00 ms → 1.25 ms), memory (1.00 kB → 0 B)" in out
    assert "not yet run on a GPU" not in out.partition("Forward and backward")[2]
    assert "A chip, 2 threads, torch 2.13.0, 2026-11-21" in out and "A card, torch 2.13.0, 2026-11-20" in out


def test_without_figures_it_says_how_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "figures_of", lambda name: [])
    assert "python benchmarks/recipes.py --only rope --publish" in run(capsys, "rope")[1]


def test_a_function_or_module_names_its_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "CrossEntropyLoss")[1] == run(capsys, "cross_entropy")[1]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(run(capsys, "--json")[1])
    assert [one["name"] for one in every] == [recipe.name for recipe in RECIPES]
    assert json.loads(run(capsys, "rope", "--json")[1]) == next(one for one in every if one["name"] == "rope")


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "atention")
    assert (code, out) == (2, "")
    assert "there is no recipe 'atention'" in err and "Did you mean attention?" in err
    assert "Did you mean" not in run(capsys, "xyz")[2]


def test_the_figures_are_of_recipes_that_there_are() -> None:
    names = {recipe.name for recipe in RECIPES}
    for row in figures.all_figures():
        assert row.recipe in names
        assert row.recipe_ms > 0 and row.baseline_ms > 0 and row.lowest <= row.highest
    assert command.recipes.__doc__


def figure(before: float, after: float) -> figures.Figure:
    return dataclasses.replace(
        FIGURES[0], baseline_ms=before, recipe_ms=after, baseline_bytes=int(before), recipe_bytes=int(after)
    )


@pytest.mark.parametrize(
    ("before", "after", "time", "memory"),
    [
        (30.0, 12.0, "2.50× faster", "2.50× less"),
        (12.0, 30.0, "2.50× slower", "2.50× more"),
        (1000.0, 1004.0, "as fast", "the same"),
        (1004.0, 1000.0, "as fast", "the same"),
    ],
)
def test_a_loss_is_shown_as_a_loss(before: float, after: float, time: str, memory: str) -> None:
    assert (figure(before, after).faster, figure(before, after).leaner) == (time, memory)


def test_lines_fit_into_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        for recipe in RECIPES:
            assert max(map(len, run(capsys, recipe.name)[1].splitlines())) <= columns
        assert max(map(len, run(capsys)[1].splitlines())) <= columns
