"""Fixtures of the recipes' tests."""

from __future__ import annotations

import importlib.util
import os
import tempfile

import pytest
import torch
from hypothesis import configuration

# What hypothesis keeps between runs does not belong into the repository. It begins to when tests are collected.
_KEPT = tempfile.TemporaryDirectory(prefix="gradscope-hypothesis-")
configuration.set_hypothesis_home_dir(_KEPT.name)


# Triton decides when a kernel is decorated, and its own functions are when it is first imported.
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run: a GPU where there is one, else the CPU, interpreted.

    A kernel's module must be imported while this is active: triton decides when a kernel is decorated.
    """
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(0)
