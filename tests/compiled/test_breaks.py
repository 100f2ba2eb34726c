"""A break of a graph costs a step what is around the regions that begin behind it, and nothing where none does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from . import breaks
from .test_models import environment

SCRIPT = Path(breaks.__file__)


def test_a_break_outside_of_the_step_costs_it_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compiled.breaks"],
        env=environment(),
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = {line.rpartition(":")[2]: rest for line, *rest in json.loads(ran.stdout.splitlines()[-1])}
    lines = SCRIPT.read_text().splitlines()
    (of_block,) = (found[number] for number in found if "graph_break()" in lines[int(number) - 1])
    (of_metric,) = (found[number] for number in found if "item()" in lines[int(number) - 1])
    evidence, cost, _ = of_block
    assert "a step enters 5 compiled regions, 1 of them behind it" in evidence and cost > 0
    evidence, cost, severity = of_metric
    assert "region" not in evidence and cost is None and severity == "info"
