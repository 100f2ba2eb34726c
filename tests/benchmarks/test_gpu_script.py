"""benchmarks/gpu.sh with a Python that only says what it was given: order, time, the table last, the exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  -) echo "2.11 13.0 A card" ;;
  "-c import xdist") exit 1 ;;
  *recipe_gpu*) echo "the table"; exit "$RECIPES_END" ;;
  *) echo "ran $*" ;;
esac
"""


def run(folder: Path, *parts: str, recipes_end: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "RESULTS": str(folder), "LOG": str(folder / "log"), "RECIPES_END": str(recipes_end)}
    environment = {**os.environ, **own, **settings}
    return subprocess.run(["bash", SCRIPT, *parts], capture_output=True, text=True, env=environment, check=False)


def test_parts_in_their_order_and_the_table_last(tmp_path: Path) -> None:
    done = run(tmp_path, "recipes", "overhead", "memory", recipes_end=1)
    lines = done.stdout.splitlines()
    assert [line.split(",")[0].split(":")[0] for line in lines if line.startswith("==")] == [
        "== recipes",
        "== overhead",
        "== memory",
    ]
    assert lines[1].startswith("== recipes: FAILED (exit 1)")
    assert lines[-2:] == ["the table", f"whole outputs: {tmp_path / 'log'}"]
    assert done.returncode == 1
    assert "the table" in (tmp_path / "log").read_text()
    assert run(tmp_path, "recipes").returncode == 0


def test_what_no_time_is_left_for_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "truth", "overhead", GPU_SECONDS="9")
    assert done.returncode == 1
    assert done.stdout.splitlines()[1:3] == ["== truth: LEFT OUT, no time", "== overhead: LEFT OUT, no time"]


def test_names_and_machines_that_there_are_not(tmp_path: Path) -> None:
    done = run(tmp_path, "speed")
    assert done.returncode == 2
    assert (
        done.stderr
        == "no part speed: triton recipes tests compiled traces overhead limits predictions analysis truth memory\n"
    )
    (tmp_path / "none").write_text("#!/usr/bin/env bash\nexit 1\n")
    (tmp_path / "none").chmod(0o755)
    assert run(tmp_path, PYTHON=str(tmp_path / "none")).returncode == 2
