"""What benchmarks/recipe_gpu prints, keeps and asks of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .gpu_fixtures import (
    FIRST,
    LIMITS,
    RECIPE,
    Figure,
    Inputs,
    Kind,
    Problem,
    Way,
    command,
    double,
    measured,
    ops,
    report,
    small,
)
from .test_gpu import WITH_LIGER


def test_lines_and_goals() -> None:
    problem = Problem(
        "op",
        "N3",
        lambda device, dtype: Inputs((), ()),
        (
            Way("eager", Kind.EAGER, double),
            Way("other", Kind.EAGER, double, goal=False),
            Way("Liger", Kind.LIGER, double),
            RECIPE,
            Way("compiled", Kind.COMPILE, double),
        ),
        bytes=4_000_000_000,
        share_goal=0.8,
        faster_than=(Kind.LIGER,),
        slower_at_most=0.5,
        leaner_at_least=4.0,
    )
    figures = [
        Figure("eager", Kind.EAGER, 4.0, 0.01, 0.2, 40 << 20, None, None, 0.25),
        Figure("other", Kind.EAGER, 0.5, 0.01, 0.2, 40 << 20, 0.0, None, 2.0),
        Figure("Liger", Kind.LIGER, failure="RuntimeError: no kernel image"),
        Figure("recipe", Kind.RECIPE, 1.25, 0.02, 1.3, 8 << 20, 0.001, False, 0.8),
        Figure("compiled", Kind.COMPILE, 1.0, 0.0, 0.1, 20 << 20, 0.002, None, 1.0),
    ]
    assert report.lines_of(problem, figures, LIMITS) == [
        "op, N3: 4000 MB, 1.000 ms",
        " eager                 4.000  25%     40",
        " other                 0.500 200%     40",
        " Liger              RuntimeError: no kernel image",
        " recipe                1.250  80%      8 h 1.30",
        " compiled              1.000 100%     20",
    ]
    found = report.results_of(problem, figures)
    asked = {r.name.removeprefix("op, N3, recipe: "): (r.value, r.goal, r.verdict) for r in found}
    assert asked["share of limit"] == (0.8, 0.8, "ok")
    assert asked["faster than best, eager"] == (3.2, 0.97, "ok")
    assert asked["faster than compiled"] == (0.8, None, "")
    assert asked["of eager's time"] == (0.3125, 0.5, "ok")
    assert asked["leaner than eager"] == (5.0, 4.0, "ok")
    assert asked["waits for the device"] == (0, 0, "ok")
    assert asked["gradient error"] == (0.001, 0.05, "ok")
    slow = [*figures[:3], Figure("recipe", Kind.RECIPE, 5.0, peak_bytes=20 << 20, waits=True, share=0.2)]
    assert report.verdict_lines(report.results_of(problem, slow)) == [
        "0 of 5 goals met, missed:",
        "  op, N3, recipe: waits for the device: 1 (goal <= 0)",
        "  op, N3, recipe: share of limit: 0.2 (goal >= 0.8)",
        "  op, N3, recipe: faster than best, eager: 0.8 x (goal >= 0.97)",
        "  op, N3, recipe: of eager's time: 1.25 x (goal <= 0.5)",
        "  op, N3, recipe: leaner than eager: 2 x (goal >= 4)",
    ]
    failed = [Figure("recipe", Kind.RECIPE, failure="CompilationError: at 3:4")]
    assert report.verdict_lines(report.results_of(problem, failed)) == [
        "0 of 1 goals met, missed:",
        "  op, N3, recipe: runs: 0 (goal >= 1)",
    ]


def test_the_whole_output_fits_into_what_is_shown_of_it() -> None:
    """Some 12,000 characters of a remote run come back; other parts need theirs."""
    total = 0
    for problem in ops.all_problems():
        ways = [Figure(way.name, way.kind, 12.345, 0.01, 0.25, 2000 << 20, 0.01, False, 0.75) for way in problem.ways]
        if Kind.LIGER not in {way.kind for way in problem.ways} and problem.op in WITH_LIGER:
            ways.append(Figure("Liger", Kind.LIGER, 12.345, 0.01, 0.25, 2000 << 20))
        total += len("\n".join(report.lines_of(problem, ways, LIMITS))) + 1
    assert total < 9_500


def test_a_run_prints_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = small(FIRST, RECIPE)
    figures = [figure.as_dict() for figure in measured(problem)]
    said = [
        {"limits": {"bytes_per_s": 4e12, "flop_per_s": 8e14}},
        {"index": 0, "figures": json.loads(json.dumps(figures))},
        {"lost": 1, "why": "its process ended with 1: no device"},
    ]
    monkeypatch.setattr(command, "supervise", lambda make, order, problems: iter(said))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert command.run([problem, problem], None, {}, tmp_path / "kept.jsonl") == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("NVIDIA H200, torch ") and shown[0].endswith("Liger not installed")
    assert shown[1] == "limits: copy 4.00 TB/s, bfloat16 product 800 TFLOP/s"
    assert "op, N3: LOST, its process ended with 1: no device" in shown
    record = json.loads((tmp_path / "kept.jsonl").read_text())
    assert record["benchmark"] == "recipes_gpu" and record["device_name"] == "NVIDIA H200"
    assert {
        "name": "limit: copy",
        "value": 4.0,
        "unit": "TB/s",
        "goal": None,
        "higher": False,
        "verdict": "",
    } in record["results"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert capsys.readouterr().err == "this machine has no CUDA device that torch can use\n"
