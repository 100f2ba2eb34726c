"""What an installed gradscope holds: every package of the source tree, and the data that they read."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def _packages() -> set[str]:
    """Names of the folders that hold Python files, as they are imported."""
    found = set()
    for top, name in (("gradscope", "gradscope"), ("recipes", "gradscope.recipes"), ("kernels", "gradscope.kernels")):
        for path in (REPOSITORY / top).rglob("*.py"):
            below = path.parent.relative_to(REPOSITORY / top).parts
            found.add(".".join((name, *below)))
    return found


def test_every_package_is_installed() -> None:
    assert set(SETTINGS["packages"]) == _packages()


def test_data_files_are_installed() -> None:
    for path in (REPOSITORY / "gradscope" / "report" / "page" / "web" / "src").iterdir():
        patterns = SETTINGS["package-data"]["gradscope.report.page"]
        assert any(fnmatch.fnmatch(f"web/src/{path.name}", pattern) for pattern in patterns), path
