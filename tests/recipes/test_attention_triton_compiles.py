"""The Triton kernels compile for GPUs, spill nothing as they are launched, and fit into a consumer's card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSUMER_SHARED_MEMORY = 99 * 1024  # of a block; CUDA C++ programming guide, compute capability 8.6 and 8.9


def run_python(folder: Path, *arguments: str | Path) -> str:
    """stdout of a Python that compiles kernels: in that of the tests they are interpreted."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT / "benchmarks")}
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr + run.stdout
    return run.stdout


def test_kernels_compile_and_fit_into_a_consumers_card(tmp_path: Path) -> None:
    code = """
from _register_cases import attention_limits
from _resources import resources
for case in attention_limits():
    print(resources(case.function, case.given, case.warps, case.stages, 89).shared_bytes)
"""
    sizes = [int(line) for line in run_python(tmp_path, "-c", code).splitlines()]
    assert len(sizes) == 9
    assert max(sizes) <= CONSUMER_SHARED_MEMORY


def test_nothing_spills_on_an_h100(tmp_path: Path) -> None:
    """The exit code is 1 where anything spills."""
    found = run_python(tmp_path, ROOT / "benchmarks" / "registers.py", "--json", "--only", "attention d64 bf16 causal$")
    kernels = [json.loads(line) for line in found.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {"forward", "all_gradients", "keys_and_values", "queries_alone"}
    assert all(kernel["spilled_bytes"] == 0 and 0 < kernel["registers"] <= 255 for kernel in kernels)


def test_the_table_is_of_these_settings(tmp_path: Path) -> None:
    """benchmarks/results/registers.md has every kernel with the tile it is launched with, and none that spills."""
    code = """
import json
from _register_cases import SPILLS, all_cases
rows = [[c.kernel, c.of, c.tile, str(c.warps), str(c.stages)] for c in all_cases(90)]
print(json.dumps([rows, sorted(SPILLS)]))
"""
    expected, known = json.loads(run_python(tmp_path, "-c", code))
    assert len(known) == 2
    page = (ROOT / "benchmarks" / "results" / "registers.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"][2:]
    assert [row[:5] for row in rows] == expected
    assert all(re.fullmatch(r"\d+", row[5]) for row in rows)
    assert {row[6] for row in rows if [row[0], row[1]] not in known} == {"0"}
