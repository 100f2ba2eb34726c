"""The benchmark of what measuring costs looks at the state that it says it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_variant_measures_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overhead
    from _common import tiny_step

    from gradscope.compat import quiet_kineto

    model, step = tiny_step("cpu", 3)
    with pytest.warns(UserWarning, match="Full backward hook is firing"), quiet_kineto():
        times = overhead.compare(model, step, "cpu", rounds=1, steps=2)
    assert set(times) == {"plain", *overhead.VARIANTS}
    assert all(len(found) == 2 and min(found) > 0 for found in times.values())
    for name in ("overhead", "_common"):
        del sys.modules[name]
