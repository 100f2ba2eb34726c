"""``[tool.gradscope]`` of a pyproject.toml: what a project sets for all its runs.

::

    [tool.gradscope]
    ignore = ["attention-by-hand"]  # rules whose findings are left out
    memory-budget = "8GiB"  # what the notes of one pass may take, see gradscope profile --memory-budget

The limits of ``gradscope check`` are below it, in ``[tool.gradscope.check]``.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.errors import UsageError
from gradscope.inputs import UnreadableError, read_text
from gradscope.safe_text import cut, local_path, shown_path, shown_repr, visible

FILE = "pyproject.toml"
_KEYS = ("ignore", "memory-budget", "check")
_MOST_BYTES = 10_000_000
_ELSEWHERE = "Fix it, or run in a folder that is not below it."
_WRITE = 'Write ignore = ["a-rule", "another-rule"]; gradscope rules lists them.'


@dataclass(frozen=True, slots=True)
class Config:
    """The keys that were given."""

    file: Path | None = None  # where they stand
    ignore: tuple[str, ...] = ()
    memory_budget: str | None = None

    def name(self, key: str) -> str:
        """Return what messages call a key."""
        return f"{shown_path(self.file or FILE)}: tool.gradscope.{key}"


def find_config(folder: Path) -> Config:
    """Settings of the nearest pyproject.toml at or above ``folder`` that has a table for gradscope.

    Raises:
        UsageError: one on the way cannot be read or is not TOML, or has a key that there is not, or a value of another
            type.
    """
    found = find_table(folder)
    if found is None:
        return Config()
    file, table = found
    return Config(file, _names(file, table.get("ignore", [])), _amount(file, table.get("memory-budget")))


def working_folder() -> Path:
    """Return the folder that gradscope runs in.

    Raises:
        UsageError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError("the working folder does not exist any more.\nChange to one that does.") from error


def find_table(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the nearest pyproject.toml at or above ``folder`` that has a table for gradscope, and that table.

    Raises:
        UsageError: as :func:`find_config`, but for the types of values.
    """
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        file = Path(local_path(place / FILE))
        table = _table(file) if os.path.isfile(file) else None  # Path.is_file() raises where a folder is closed to us
        if table is not None:
            refuse_unknown(file, "tool.gradscope", table, _KEYS)
            return file, table
    return None


def _table(file: Path) -> Mapping[str, Any] | None:
    name = shown_path(file)
    try:
        record = tomllib.loads(read_text(file, _MOST_BYTES))
    except UnreadableError as error:
        raise UsageError(f"{name} cannot be read: {error}.\n{_ELSEWHERE}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {cut(visible(str(error)), 200)}.\n{_ELSEWHERE}") from error
    except RecursionError as error:
        raise UsageError(f"{name} is not TOML: its brackets are nested too deeply.\n{_ELSEWHERE}") from error
    except ValueError as error:  # of int(), which takes no text of thousands of digits
        raise UsageError(f"{name} is not TOML: a number in it has too many digits.\n{_ELSEWHERE}") from error
    tool = record.get("tool")
    found = tool.get("gradscope") if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise UsageError(
            f"{shown_path(file)}: tool.gradscope is not a table.\nWrite [tool.gradscope] and its keys below it."
        )
    return found


def refuse_unknown(file: Path, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise :class:`UsageError` for a key that there is not."""
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
            raise UsageError(f"{shown_path(file)}: {where} has no key {cut(visible(key), 60)}.\n{hint}")


def _amount(file: Path, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(
            f"{shown_path(file)}: tool.gradscope.memory-budget is not text but {shown_repr(value)}.\n"
            'Write memory-budget = "4GiB".'
        )
    return value


def _names(file: Path, value: Any) -> tuple[str, ...]:
    where = f"{shown_path(file)}: tool.gradscope.ignore"
    if not isinstance(value, list):
        raise UsageError(f"{where} is not a list but {shown_repr(value)}.\n{_WRITE}")
    for item in value:
        if not isinstance(item, str):
            raise UsageError(f"{where} holds {shown_repr(item)}, which is not text.\n{_WRITE}")
    return tuple(value)
