"""Tensors whose elements lie more than 2^31 elements apart, and kernels on them, a few programs of many.

Memory that nobody writes to costs nothing, so such tensors are cheap as long as few of their pages are touched. The
grids of kernels that would touch all are run by their last program alone, and every address is checked before it is
used: one that was computed in 32 bits would end the process instead of failing a test.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

FAR = (1 << 31) + 64  # elements
_NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python names from 3.12 on


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """As ``torch.zeros``, without touching its memory, and also where there is not enough."""
    size = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def spread(near: Tensor, axis: int) -> Tensor:
    """A copy whose neighbours along ``axis`` are FAR apart."""
    strides = list(torch.empty(near.shape).stride())
    strides[axis] = FAR
    count = sum((size - 1) * stride for size, stride in zip(near.shape, strides, strict=True)) + 1
    found = zeros(count, dtype=near.dtype).as_strided(near.shape, strides)
    return found.copy_(near)


class Ran(Exception):
    """The kernel that was waited for has run."""


class Programs:
    """Runs kernels in the place of triton's interpreter of grids."""

    def __init__(self) -> None:
        self.last_only = False  # of each dimension of a grid
        self.alone: str | None = None  # the one kernel that runs, after which Ran is raised
        self.arguments: dict[str, Any] = {}  # of that kernel

    @contextmanager
    def only(self, kernel: str) -> Iterator[None]:
        """Runs the last program of this kernel, and nothing after it."""
        self.last_only, self.alone = True, kernel
        with pytest.raises(Ran):
            yield

    def indices(self, grid: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """The programs that run."""
        if self.last_only:
            return [tuple(size - 1 for size in grid)]
        return [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]


@pytest.fixture
def programs(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """What the kernels of a test are run by."""
    if triton_device.type == "cuda":
        pytest.skip("programs are picked by triton's interpreter, which is not used where there is a GPU")
    from triton.runtime import interpreter

    found = Programs()
    known: list[tuple[int, int]] = []  # memory of the arguments

    def call(executor: Any, *given: Any, **named: Any) -> None:
        if found.alone not in (None, executor.fn.__name__):
            return
        named = {name: value for name, value in named.items() if name in inspect.getfullargspec(executor.fn).args}
        values = inspect.getcallargs(executor.fn, *given, **named)
        known[:] = [_extent(tensor) for tensor in _tensors(values.values())]
        grid = (*executor.grid, 1, 1)[:3]
        scope = interpreter._patch_lang(executor.fn)
        try:
            converted = {
                name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in values.items()
            }
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for index in found.indices(grid):
                interpreter.interpreter_builder.set_grid_idx(*index)
                executor.fn(**converted)
        finally:
            scope.restore()
        if found.alone is not None:
            found.arguments = values
            raise Ran

    def require_known(pointers: Any, mask: Any) -> None:
        used = pointers.data[mask.data.astype(bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = torch.zeros(used.shape, dtype=torch.bool).numpy()
        for start, end in known:
            inside |= (used >= start) & (used <= end - size)
        if not inside.all():
            raise IndexError("an address lies outside of the kernel's arguments")

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        require_known(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        require_known(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _extent(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
