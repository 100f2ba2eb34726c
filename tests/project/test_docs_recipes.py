"""The recipes' pages: their snippets run, their links lead somewhere, their figures are those that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradscope.kernels import pays
from gradscope.recipes.figures import Figure, figures_of, markdown

PAGES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("*.md"))
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@EACH
def test_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page one after the other, as a reader would."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = blocks(page)
    assert found, "no snippet"
    names: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        exec(compile(block, str(page), "exec"), names)


@EACH
def test_links_lead_to_pages(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@EACH
def test_figures_are_those_that_were_measured(page: Path) -> None:
    """``python benchmarks/recipes.py --publish`` writes both."""
    text = page.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^<!-- figures -->\n(.*?)\n<!-- /figures -->$", text, re.DOTALL | re.MULTILINE)
    assert shown == markdown(figures_of(page.stem))


# Whose page has its rule; packed attention's is in its table.
PAGE_OF_RULE = {
    "swiglu of a packed tensor": "swiglu",
    "bias_gelu": "gelu",
    "geglu": "swiglu",
    **{f"{name}{end}": "norm" for name in ("add_rms_norm", "add_layer_norm") for end in ("", " with dropout")},
    "rms_norm": "norm",
}


@pytest.mark.parametrize(
    "rule", [name for name in pays.FEWEST if not name.startswith("packed") and "inter" not in name]
)
def test_pages_say_from_which_sizes_own_code_runs(rule: str) -> None:
    """As kernels/pays.py has them: the one place that decides."""
    of_attention = "attention" if rule.startswith("attention with") else rule
    page = next(page for page in PAGES if page.stem == PAGE_OF_RULE.get(rule, of_attention))
    text = page.read_text(encoding="utf-8").partition("## Limits")[2].partition("## Accuracy")[0]
    said = {number for fewest in pays.FEWEST[rule].values() for number in fewest if number != pays.NEVER}
    assert {number for number in said if f"{number:,}" not in text} == set()


@EACH
def test_sections(page: Path) -> None:
    found = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"Method", "Limits", "Accuracy", "Figures"} <= set(found) and len(found) == len(set(found))


ON_CPU = Figure(
    "gelu", "N8", "F.gelu", "cpu", "A chip", 2, "2.13.0", "2026-11-21T10:00:00Z", 10.0, 12.5, 0.7, 1.1, 1000, 2000
)


def test_a_table_of_each_machine() -> None:
    on_gpu = Figure(
        "gelu", "N9", "F.gelu", "cuda", "A card", 2, "2.13.0", "2026-11-22T10:00:00Z", 1.0, 0.5, 1.9, 2.1, 2000, 1000
    )
    head = "| case | compared with | time | | in single rounds | memory | |\n|---|---|---|---|---|---|---|\n"
    first = (
        "A chip, 2 threads, torch 2.13.0, 2026-11-21:\n\n"
        + head
        + "| N8 | F.gelu | 10.0 ms → 12.5 ms | 1.25× slower | 0.70× to 1.10× | 1.00 kB → 2.00 kB | 2.00× more |"
    )
    second = (
        "A card, torch 2.13.0, 2026-11-22:\n\n"
        + head
        + "| N9 | F.gelu | 1.00 ms → 500 µs | 2.00× faster | 1.90× to 2.10× | 2.00 kB → 1.00 kB | 2.00× less |"
    )
    assert markdown([ON_CPU, on_gpu]) == f"{first}\n\n{second}"
    assert markdown([ON_CPU]) == f"{first}\n\nNot yet run on a GPU."
    assert markdown([]) == "Not measured yet."
