"""Block sizes and warps of the Triton kernels, by head size, dtype and device.

No clock chose these sizes, but ptxas. They are the largest tried at which causal attention spills
no registers on an H100, by itself and with dropout; benchmarks/results/registers.md has the figures, and what is left:
dk and dv in float32 with dropout at size 128, where deterministic algorithms are asked for, and sizes above 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SMALLEST = 16  # that the tensor cores multiply
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one kernel cuts its tensors into blocks, and with what it runs them."""

    m: int  # queries
    n: int  # keys
    warps: int
    stages: int  # of loads under way


def padded(size: int) -> int:
    """The power of two that a head size is padded to."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def forward_blocks(size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool) -> Tiling:
    """The tiling of the forward kernel.

    A block of queries is large, for it is read once and decides how often all keys are read. Consumer cards (8.6, 8.9,
    12.0) have 99 kB of shared memory, of which queries take m · size and each stage n · 2 size elements; an H100 has
    227.

    Args:
        size: the larger of the two padded head sizes.
        capability: of the device; None for the interpreter.
        rich: scores get a bias, a mask or dropout. What these hold beside the sums spills from four warps' registers.
    """
    if dtype == torch.float32:  # without tensor cores registers are short first
        return Tiling(32, 32, 8, 1) if size <= 32 else Tiling(64, 32, 8, 1) if size <= 64 else Tiling(16, 32, 8, 1)
    if size <= 64:
        return Tiling(128, 64, 8 if rich else 4, 3)
    if size <= 128:
        return Tiling(128, 64 if rich else 128, 8, 2) if _large(capability) else Tiling(128, 32, 8, 2)
    return Tiling(64 if rich else 128, 64, 8, 2) if _large(capability) else Tiling(64, 32, 8, 1)


def one_pass_blocks(size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool) -> Tiling | None:
    """The tiling of the kernel of all three gradients; None where it would spill: there two kernels do it.

    Keys and values stay, and their two sums in registers, n · 2 size floats. A block of queries is small, for four
    tiles of scores and a part of dq are alive at once.
    """
    if dtype == torch.float32:
        if size <= 32:
            return Tiling(32 if rich else 16, 32, 8, 1)
        if size <= 64:
            return Tiling(16, 32, 8, 1)
        return (Tiling(16, 16, 8, 1) if rich else Tiling(32, 32, 8, 1)) if size <= 128 else None
    if size <= 32:
        return Tiling(32 if rich else 64, 128, 8, 3)
    return Tiling(16 if rich else 32, 128, 8, 3) if size <= 64 else None


def keys_blocks(size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool) -> Tiling:
    """The tiling of the kernel of dk and dv alone."""
    if dtype == torch.float32:
        return Tiling(16, 16, 8, 1) if rich or size > 64 else Tiling(32, 32, 8, 1)
    if size <= 32:
        return Tiling(32 if rich else 64, 128, 8, 3)
    if size <= 64:
        return Tiling(16 if rich else 32, 128, 8, 3)
    if size <= 128:
        return Tiling(16, 32 if rich else 128, 8, 2) if _large(capability) else Tiling(16, 32 if rich else 64, 8, 2)
    return Tiling(16 if rich else 32, 32, 8, 2) if _large(capability) else Tiling(16, 32, 8, 1)


def queries_blocks(size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool) -> Tiling:
    """The tiling of the kernel of dq alone, and of the bias's: as the other, queries and keys in each other's place."""
    if dtype == torch.float32:
        return Tiling(32, 32, 8, 1) if size <= 64 else Tiling(32, 16, 8, 1) if size <= 128 else Tiling(16, 16, 8, 1)
    if size <= 64:
        return Tiling(128, 32 if rich else 64, 8, 3)
    if size <= 128:
        return Tiling(128, 32 if rich else 64, 8, 2) if _large(capability) else Tiling(64, 32, 8, 1)
    return Tiling(64, 32, 8, 2) if _large(capability) else Tiling(32, 16, 8, 1)


class BackwardBlocks(NamedTuple):
    """The tilings of the kernels of a backward."""

    one_pass: Tiling | None  # None: two kernels
    keys: Tiling
    queries: Tiling


def forward_candidates(
    size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool
) -> tuple[Tiling, ...]:
    """The tilings that forward may take; the default first, the others to be timed."""
    default = forward_blocks(size, dtype, capability, rich)
    if dtype == torch.float32 or size > 128 or not _large(capability):
        return (default,)
    other = Tiling(128, 128, 8, 3) if size <= 64 else Tiling(128, 64, 8, 3)
    return (default, Tiling(64, 64, 4, 3)) if rich else (default, other, Tiling(64, 64, 4, 3))


def backward_candidates(
    size: int, dtype: torch.dtype, capability: tuple[int, int] | None, rich: bool
) -> tuple[BackwardBlocks, ...]:
    """The tilings that backward may take, as :func:`forward_candidates`.

    Among them is one pass where it spills some hundred bytes: what these cost, only a GPU tells.
    """
    kind = (size, dtype, capability, rich)
    default = BackwardBlocks(one_pass_blocks(*kind), keys_blocks(*kind), queries_blocks(*kind))
    if dtype == torch.float32 or size > 128 or not _large(capability):
        return (default,)
    if size <= 64:
        return (default, default._replace(one_pass=Tiling(64, 128, 8, 2)), default._replace(one_pass=None))
    return (default, *(default._replace(one_pass=Tiling(m, 128, 8, 2)) for m in (16, 32)))


def _large(capability: tuple[int, int] | None) -> bool:
    # 9.0 and 10.0 are data center parts with 227 kB; 12.0 is a consumer's again.
    return capability is not None and HOPPER <= capability < (11, 0)
