"""Two thousand damaged files: refused in words, or shown everywhere."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradscope.compare.check_config import find_settings
from gradscope.config import find_config
from gradscope.errors import GradscopeError, UsageError
from gradscope.fixing import load_fix
from gradscope.limits import read as read_limits
from gradscope.limits import store
from gradscope.report.runfile import from_json, load_run
from gradscope.tables import RunData
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.report.strange_files import (
    BASES,
    FIX,
    LIMITS,
    RECORDS,
    SETTINGS,
    require_harmless,
)
from tests.report.strange_fixtures import (
    mutant,
    render_check,
    render_diff,
    render_fix,
    render_run,
)

pytestmark = pytest.mark.usefixtures("folder")


def test_mutated_runs(no_plotly: None) -> None:
    shown = sum(_mutated_run(seed) for seed in range(1_500))
    assert shown > 300  # else the mutations are so coarse that no renderer sees one


def _mutated_run(seed: int) -> bool:
    rng = random.Random(seed)
    number = rng.choice((0, 0, 1, 2))
    run = _loaded(load_run, mutant(rng, RECORDS[number]), seed)
    if run is None:
        return False
    try:
        _require_shown(run, BASES[number])
    except Exception as error:
        raise AssertionError(f"mutation {seed} was read, and could not be shown") from error
    return True


def _require_shown(run: RunData, base: RunData) -> None:
    texts = render_run(run)
    assert from_json(texts["json"]) == run
    render_check(run, base)
    for name, text in {**texts, **render_diff(base, run)}.items():
        require_harmless(name, text)
    render_diff(run, base)


def test_mutated_fixes() -> None:
    shown = 0
    for seed in range(300):
        fix = _loaded(load_fix, mutant(random.Random(seed), FIX), seed)
        if fix is not None:
            shown += 1
            for name, text in render_fix(fix).items():
                require_harmless(name, text)
    assert shown > 50


def test_mutated_settings_and_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "limits_file", lambda: folder / "limits.json")
    for seed in range(100):
        (folder / "limits.json").write_bytes(mutant(random.Random(seed), LIMITS))
        for entry in read_limits().entries:
            assert entry.limits.bytes > 0
            assert entry.limits.call_ns > 0
    for seed in range(100):
        (folder / "pyproject.toml").write_bytes(_mutated_toml(random.Random(seed)))
        for find in (find_config, find_settings):
            try:
                find(folder)
            except UsageError as error:
                _require_message(str(error), seed)


def _mutated_toml(rng: random.Random) -> bytes:
    from tests.report.strange_fixtures import TEXTS, damage_text

    text = SETTINGS
    if rng.random() < 0.7:
        words = re.findall(r'"[^"]*"|\w+', text)
        other = rng.choice(("1", "[]", "{}", "1e999", "nan", "9" * 5_000, "[" * 2_000, json.dumps(rng.choice(TEXTS))))
        text = text.replace(rng.choice(words), other, 1)
        return text.encode("utf-8", "backslashreplace")
    return damage_text(rng, text)


def _loaded(load: Callable[[Path], Any], data: bytes, seed: int) -> Any:
    """What the reader made of it; None where it refused, in words that are fit to be read."""
    Path("x.json").write_bytes(data)
    try:
        return load(Path("x.json"))
    except GradscopeError as error:
        _require_message(str(error), seed)
        return None
    except Exception as error:
        raise AssertionError(f"mutation {seed} was not refused, but failed") from error


def _require_message(message: str, seed: int) -> None:
    lines = message.split("\n")
    assert 1 <= len(lines) <= 3, (seed, message)
    assert all(line.isprintable() for line in lines), (seed, message)
    assert len(message) < 700, (seed, message)
