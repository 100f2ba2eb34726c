"""benchmarks/fix.py: its cases and goals, what it says where a clone is missing, and how it counts verdicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradscope import Workload
from tests.made_times import SLOWER, made_times
from tests.patching import small

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BATCH = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their folder can be imported from; what was, is forgotten after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_every_step_has_goals() -> None:
    import _fix_cases

    for case in _fix_cases.CASES.values():
        assert case.speed >= 0.98 and case.memory >= 1.0, "never slower beyond noise, never hungrier"
        assert bool(case.repo) == bool(case.commit) == bool(case.module)


def test_a_clone_that_is_missing(tmp_path: Path) -> None:
    import _fix_cases

    with pytest.raises(_fix_cases.Missing) as caught:
        _fix_cases.workload_of(_fix_cases.CASES["mingpt"], tmp_path, tiny=True)
    assert str(caught.value) == (
        "git clone https://github.com/karpathy/minGPT FOLDER/karpathy+minGPT, and --sources FOLDER"
    )


def test_how_often_a_verdict_is_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import fix

    use = made_times(monkeypatch)
    real, runs = fix.verify, []

    def verify(*args: object) -> object:
        runs.append(args)
        if len(runs) == 3:
            use(SLOWER)
        return real(*args)

    monkeypatch.setattr(fix, "verify", verify)
    share, _ = fix.steadiness("causal", Workload(small.Causal(), BATCH), "cpu", 3, 0)
    assert (share.value, share.goal) == (pytest.approx(2 / 3), 0.9)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("causal: 2 of 3 runs kept 1 ") and said[1] == "causal: 1 of 3 runs kept nothing"


def test_gain_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import fix
    from _fix_cases import WholeStep

    made_times(monkeypatch)
    case = WholeStep(lambda: None, either=(1.25, 4.0))
    results = {
        result.name: result
        for result in fix.measure("causal", Workload(small.Causal(), BATCH), case, "cpu", tiny=False)
    }
    assert results["causal: speed"].goal == 0.98 and results["causal: memory"].goal == 1.0
    assert results["causal: of x1.25 or 4 times leaner"].goal == 1.0
    assert results["causal: places kept of 1"].value == 1
