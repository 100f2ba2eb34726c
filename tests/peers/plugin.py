"""A plugin for the pytest that runs a peer's tests: what it leaves out."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.peers.suites import LARGE, LARGEST, LEFT, elements, why_left


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out what the table names, and what is too large unless asked for; an entry that fits nothing fails."""
    kept, left, used = [], [], set()
    for item in items:
        entry = why_left(item.module.__name__.rpartition(".")[2], item.name)
        used.add(entry)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        large = elements(parameters) > LARGEST and not os.environ.get(LARGE)
        (left if entry or large else kept).append(item)
    files = {item.module.__name__.rpartition(".")[2] for item in items}
    stale = [entry.test for entry in LEFT if entry.file in files and entry not in used]
    if stale:
        raise pytest.UsageError(f"tests/peers/suites.py leaves out tests that there are not: {', '.join(stale)}")
    config.hook.pytest_deselected(items=left)
    items[:] = kept
