"""Attention's Triton kernels compile for GPUs, and fit into a consumer card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER_SHARED_MEMORY = 99 * 1024  # of a block; CUDA C++ programming guide, compute capability 8.6 and 8.9


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_attention.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 8
    assert all(size <= CONSUMER_SHARED_MEMORY for size in found.values()), found
