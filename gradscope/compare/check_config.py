"""``[tool.gradscope.check]`` of a pyproject.toml: the limits that a project sets for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.config import FILE, find_table, refuse_unknown
from gradscope.errors import UsageError
from gradscope.safe_text import shown_path, shown_repr

# The keys that are text.
_EXAMPLES = {
    "baseline": "baseline.json",
    "max-regression": "5%",
    "max-memory-regression": "2%",
    "max-peak": "6GiB",
    "max-saved": "2GiB",
}


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The keys as they were given, text; ``None`` is not set."""

    file: Path | None = None  # where they stand
    baseline: Path | None = None  # relative to the file's folder
    max_regression: Sequence[str] | None = None
    max_memory_regression: str | None = None
    max_peak: str | None = None
    max_saved: str | None = None
    strict: bool = False

    def name(self, key: str) -> str:
        """What messages call a setting."""
        return f"{shown_path(self.file or FILE)}: tool.gradscope.check.{key}"


def find_settings(folder: Path) -> CheckSettings:
    """The settings of the nearest pyproject.toml at or above ``folder`` that has any for gradscope.

    Raises:
        UsageError: one on the way is not TOML or cannot be read, or has a key that there is not, or a value that is
            no text.
    """
    found = find_table(folder)
    if found is None:
        return CheckSettings()
    file, table = found
    ours = table.get("check", {})
    if not isinstance(ours, dict):
        raise UsageError(
            f"{shown_path(file)}: tool.gradscope.check is not a table.\n"
            "Write [tool.gradscope.check] and its keys below it."
        )
    refuse_unknown(file, "tool.gradscope.check", ours, (*_EXAMPLES, "strict"))
    baseline = _text(file, ours, "baseline")
    return CheckSettings(
        file=file,
        baseline=None if baseline is None else file.parent / baseline,
        max_regression=_texts(file, ours, "max-regression"),
        max_memory_regression=_text(file, ours, "max-memory-regression"),
        max_peak=_text(file, ours, "max-peak"),
        max_saved=_text(file, ours, "max-saved"),
        strict=_flag(file, ours, "strict"),
    )


def _flag(file: Path, table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if isinstance(value, bool):
        return value
    raise UsageError(
        f"{shown_path(file)}: tool.gradscope.check.{key} is not true or false but {shown_repr(value)}.\n"
        f"Write {key} = true"
    )


def _text(file: Path, table: Mapping[str, Any], key: str) -> str | None:
    value = table.get(key)
    if value is None or isinstance(value, str):
        return value
    raise UsageError(
        f"{shown_path(file)}: tool.gradscope.check.{key} is not text but {shown_repr(value)}.\n"
        f'Write {key} = "{_EXAMPLES[key]}"'
    )


def _texts(file: Path, table: Mapping[str, Any], key: str) -> Sequence[str] | None:
    value = table.get(key)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, list):
        odd = next(item for item in value if not isinstance(item, str))
        where = f"{shown_path(file)}: tool.gradscope.check.{key}"
        raise UsageError(f'{where} holds {shown_repr(odd)}, which is not text.\nWrite {key} = ["5%", "h.*.attn=10%"]')
    text = _text(file, table, key)
    return None if text is None else [text]
