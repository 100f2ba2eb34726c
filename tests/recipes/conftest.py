"""Fixtures of the recipes' tests."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
from hypothesis import configuration
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradscope.kernels import pays

from ..process_group import alone

# What hypothesis keeps between runs does not belong into the repository. It begins to when tests are collected.
_KEPT = tempfile.TemporaryDirectory(prefix="gradscope-hypothesis-")
configuration.set_hypothesis_home_dir(_KEPT.name)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One CPU in a process group of its own."""
    with alone():
        yield init_device_mesh("cpu", (1,))


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run: a GPU where there is one, else the CPU, interpreted.

    A kernel's module must be imported while this is active: triton decides when a kernel is decorated.
    """
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        _wake_engine()
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _interpret_library(monkeypatch)
    return torch.device("cpu")


@functools.cache
def _wake_engine() -> None:
    """Let the engine's thread of the device launch something: torch warns where the first that it calls is cuBLAS."""
    torch.ones(1, device="cuda", requires_grad=True).exp().backward()
    torch.cuda.synchronize()


def _interpret_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret triton's own functions too: they were decorated when triton was imported, perhaps long ago."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.standard, tl.random):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(member.fn))


@pytest.fixture(autouse=True)
def own_code_at_every_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors do for what is tested here, whatever was measured; attention has a rule between its ways.

    Not for tests marked ``measured_sizes``.
    """
    if request.node.get_closest_marker("measured_sizes") is None:
        fewest = {
            "attention with dropout": {"scores": (200_000, 200_000)},
            "attention with dropout and a mask": {"scores": (200_000, 200_000)},
            "packed_attention": {"tokens": (256, 256)},
            "packed_attention with held scores": {"scores": (10_000, 10_000)},
        }
        most = {"packed_attention": {"tokens": 1_024}, "packed_attention with held scores": {"scores": 300_000}}
        monkeypatch.setattr(pays, "FEWEST", fewest)
        monkeypatch.setattr(pays, "MOST", most)


@pytest.fixture(autouse=True)
def one_compiler() -> Iterator[None]:
    """Inductor compiles in the thread that asks: its pool would outlive the test."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(0)
