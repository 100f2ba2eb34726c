"""The measured figures on the recipes' pages, between two markers."""

from __future__ import annotations

from _common import ROOT

from gradscope.recipes.figures import figures_of, markdown

BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"


def write_pages() -> None:
    """Put recipes/figures.json onto every page of docs/recipes."""
    for path in sorted((ROOT / "docs" / "recipes").glob("*.md")):
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{BEGIN}{markdown(figures_of(path.stem))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_pages()
