"""Kernels on the CPU have a row each, and the code that they have alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gradscope.compat import GraphWatch, watching_graphs
from gradscope.compat.inductor.rows import KernelRows

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def named(prof: profile) -> list[str]:
    return [event.name for event in prof.events() or ()]


def generated(**names: Any) -> Any:
    """Something as Inductor generates it: its functions find the kernels among the module's names."""
    scope = dict(names)
    exec("def call(x):\n    return cpp_fused_floor_0(x)", scope)
    return SimpleNamespace(call=scope["call"], scope=scope)


def test_a_kernel_has_a_row_while_a_profiler_runs_until_all_is_put_back() -> None:
    rows, module = KernelRows(), generated(cpp_fused_floor_0=math.floor, floor=math.floor, cpp_number=3)
    rows.put_in(module.call)
    rows.put_in(module.call)  # of two graphs with the same code
    assert module.scope["floor"] is math.floor and module.scope["cpp_number"] == 3
    assert module.call(2.5) == 2
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        assert module.call(2.5) == 2
        with pytest.raises(TypeError):
            module.call("")
    assert named(prof) == ["cpp_fused_floor_0"] * 2
    rows.take_out()
    assert module.scope["cpp_fused_floor_0"] is math.floor


def test_what_the_program_has_put_there_since_stays() -> None:
    rows, module = KernelRows(), generated(cpp_fused_floor_0=math.floor)
    rows.put_in(module.call)
    module.scope["cpp_fused_floor_0"] = abs
    rows.take_out()
    assert module.call(-2) == 2


@pytest.mark.parametrize("function", [None, "", SimpleNamespace()])
def test_what_is_not_generated_for_python_is_left_alone(function: Any) -> None:
    rows = KernelRows()
    rows.put_in(function)
    rows.take_out()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Where Inductor keeps what it compiles, in this thread; it adds to where Python looks for modules, too."""
    from torch._inductor import config

    with (
        pytest.MonkeyPatch.context() as patch,
        config.patch({"compile_threads": 1, "cpp_cache_precompile_headers": False}),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        patch.setattr(sys, "path", list(sys.path))
        yield tmp_path
        torch._dynamo.reset()


def test_the_files_of_kernels_are_those_that_the_program_has_alone(cache: Path) -> None:
    """So its cache of them is neither missed nor filled: nothing is compiled by C++ a second time."""
    failed: list[Exception] = []

    def run() -> None:
        from torch._inductor import codecache

        torch._dynamo.reset()
        codecache.PyCodeCache.cache_clear()
        codecache.CppPythonBindingsCodeCache.cache_clear()
        torch.compile(lambda x: x.sin().cumsum(0).sum())(torch.rand(32, 32))

    def kernels() -> set[str]:
        return {path.name for path in cache.rglob("*.so")}

    def loaded() -> list[Any]:
        from torch._inductor import codecache

        names = [vars(module) for module in codecache.PyCodeCache.modules]
        return [kernel for each in names for name, kernel in each.items() if name.startswith("cpp_")]

    run()
    alone, watch = kernels(), GraphWatch()
    with watching_graphs(watch, failed.append), profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
        assert any(isinstance(kernel, FunctionType) for kernel in loaded())
    assert not failed and kernels() == alone != set()
    assert not any(isinstance(kernel, FunctionType) for kernel in loaded())  # as they were
    of_graphs = [name for graph in watch.graphs for name, _ in graph.kernels if name.startswith("cpp_")]
    assert [name for name in named(prof) if name.startswith("cpp_")] == of_graphs != []
