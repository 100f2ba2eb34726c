"""``[tool.gradscope]`` of pyproject.toml: where it is found, and what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradscope.config import find_config
from gradscope.errors import UsageError


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pyproject.toml"
    file.write_text(text, encoding="utf-8")
    return file.resolve()


def test_the_nearest_file_that_has_the_table(tmp_path: Path) -> None:
    file = write(tmp_path, '[tool.gradscope]\nignore = ["one", "two"]\n')
    write(tmp_path / "package", '[project]\nname = "another-tool-only"\n')
    inner = tmp_path / "package" / "inner"
    inner.mkdir()
    config = find_config(inner)
    assert (config.file, config.ignore) == (file, ("one", "two"))
    assert config.name("ignore") == f"{file}: tool.gradscope.ignore"
    nearer = write(inner, "[tool.gradscope]\n")
    assert (find_config(inner).file, find_config(inner).ignore) == (nearer, ())


def test_the_limits_of_check_may_stand_beside(tmp_path: Path) -> None:
    write(tmp_path, '[tool.gradscope]\nignore = ["one"]\n\n[tool.gradscope.check]\nmax-peak = "1GiB"\n')
    assert find_config(tmp_path).ignore == ("one",)


def test_a_folder_without_any(tmp_path: Path) -> None:
    write(tmp_path, "[project]\n")
    assert find_config(tmp_path).ignore == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.gradscope\n", " is not TOML: "),
        ("tool.gradscope = 3\n", ": tool.gradscope is not a table.\nWrite [tool.gradscope] and its keys below it."),
        ("[tool.gradscope]\nignores = []\n", ": tool.gradscope has no key ignores.\nDid you mean ignore?"),
        (
            "[tool.gradscope]\ncolour = 1\n",
            ": tool.gradscope has no key colour.\nThere are ignore, memory-budget, check.",
        ),
        (
            '[tool.gradscope]\nignore = "one"\n',
            ": tool.gradscope.ignore is not a list but 'one'.\n"
            'Write ignore = ["a-rule", "another-rule"]; gradscope rules lists them.',
        ),
        ('[tool.gradscope]\nignore = ["one", 2]\n', ": tool.gradscope.ignore holds 2, which is not text.\n"),
        ("[tool.gradscope.ignore]\n", ": tool.gradscope.ignore is not a list but {}.\n"),
    ],
)
def test_mistakes_name_the_file_and_the_key(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        find_config(tmp_path)
    assert str(caught.value).startswith(f"{file}{message}")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "[tool.gradscope]\n")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError) as caught:
        find_config(tmp_path)
    assert (
        str(caught.value)
        == f"{file} cannot be read: Permission denied.\nFix it, or run in a folder that is not below it."
    )
