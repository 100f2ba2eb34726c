"""What the documents for developers say of the code: a file that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
_FILES = [path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.rglob("*.py") if ".venv" not in path.parts]


@pytest.mark.parametrize("document", ["docs/architecture.md", "docs/patching.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    """A bare name is that of a file in a folder that the same section names: another folder may have one too."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    assert re.search(r"`[\w/]+\.py", text)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        named = re.findall(r"`([\w/]+\.py)", section)
        folders = {
            each.rpartition("/")[0] for each in (*named, *re.findall(r"`([\w/]+/)(?:\w+)?`", section)) if "/" in each
        }
        missing = [name for name in named if not any(_is_file(name, folder) for folder in ("", *folders))]
        assert not missing, f"{document} names {missing}"


@pytest.mark.parametrize("document", [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))], ids=str)
def test_paths_below_a_folder_of_the_repository_exist(document: Path) -> None:
    """In documents for users: other programs that they name have files of their own."""
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/])(?:tests|gradscope|benchmarks|recipes|kernels)/[\w/]+\.py\b", text)
    missing = [name for name in named if name not in _FILES and f"gradscope/{name}" not in _FILES]
    assert not missing, f"{document.name} names {missing}"


def _is_file(name: str, folder: str) -> bool:
    if "/" in name:
        return any(f"/{file}".endswith(f"/{name}") for file in _FILES)
    return any(f"/{file}".endswith(f"{folder}/{name}" if folder else f"/gradscope/{name}") for file in _FILES)


def test_files_that_a_docstring_of_gradscope_names_exist() -> None:
    """Of modules, ``:mod:`gradscope.x.y```: what such a reference is to."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in _FILES}
    modules |= {f"gradscope.{name}" for name in modules if name.startswith(("recipes", "kernels"))}
    for file in _FILES:
        if file.startswith(("gradscope/", "recipes/", "kernels/")):
            named = re.findall(r":mod:`(gradscope[\w.]*)`", (REPOSITORY / file).read_text(encoding="utf-8"))
            assert not set(named) - modules, f"{file} names {sorted(set(named) - modules)}"
