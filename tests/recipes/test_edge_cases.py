"""Every edge case is tested for every recipe, or has a reason not to be: edge_cases.py, held against the sources."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from gradscope.recipes.catalogue import all_recipes

from .edge_cases import CASES, COVERED, NOT_APPLICABLE

FOLDER = Path(__file__).parent


@functools.cache
def functions_in(module: str) -> frozenset[str]:
    """Names of the test functions in a file of this folder."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_recipe_has_its_row() -> None:
    assert set(COVERED) == {recipe.name for recipe in all_recipes()}


@pytest.mark.parametrize("recipe", COVERED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case {case}")
def test_each_case_is_covered_or_has_its_reason(case: int, recipe: str) -> None:
    named = COVERED[recipe].get(case, "").split()
    reasons = NOT_APPLICABLE.get(case, {})
    reason = reasons.get(recipe) or (None if named else reasons.get(""))
    assert bool(named) != bool(reason), f"case {case} of {recipe}, {CASES[case]}: one of tests and reason"
    for test in named:
        module, function = test.split("::")
        assert function in functions_in(module), f"case {case} of {recipe}: there is no {test}"


def test_no_reason_is_left_over() -> None:
    """Nor a test under a case that there is not."""
    assert {case for cases in COVERED.values() for case in cases} == set(CASES)
    for case, reasons in NOT_APPLICABLE.items():
        open_ones = {recipe for recipe, cases in COVERED.items() if case not in cases}
        assert set(reasons) - {""} <= open_ones
        assert ("" in reasons) == bool(open_ones - set(reasons))
