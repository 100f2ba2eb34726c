"""Pairs for benchmarks/estimates.py beside the twins of the tests: what needs a GPU, limits, or the process's heap.

Each is as a twin: the same work with what a rule advises and without. Those of a GPU are skipped where there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Made = dict[str, Any]

# Rules without a pair, and why.
_RANKS = "several ranks, which share the cores of one machine here; it promises no saving"
_PROMISES_NOTHING = "promises nothing"
WITHOUT = {
    "exposed-communication": _RANKS,
    "late-bucket": _RANKS,
    "compile-failed": _PROMISES_NOTHING,
    "graph-break": _PROMISES_NOTHING,
    "graph-recompute": _PROMISES_NOTHING,
    "not-compiled": _PROMISES_NOTHING,
    "recompiles": _PROMISES_NOTHING,
}

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


@dataclass(frozen=True)
class Pair:
    """Bad and good, as :class:`tests.diagnose.run_case.Twin` has them.

    Args:
        worth: how many of the bad one's steps one of the good one's does the work of: a larger batch is several.
        device: that it needs.
        lasting: the good one changes the process for good: all of the bad one's rounds come before.
    """

    name: str
    rule: str
    bad: Callable[[], Made]
    good: Callable[[], Made]
    worth: int = 1
    device: str = "cpu"
    lasting: bool = False


class Wide(nn.Module):
    """Results of more than 32 MiB, which glibc takes from the system anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y * y.sigmoid() + y.relu()


def _wide() -> Made:
    return {"model": Wide(), "batch": torch.randn(4096, 8)}


def _wide_kept() -> Made:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return _wide()


def _small_layers(rows: int) -> Callable[[], Made]:
    return lambda: {"model": nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))), "batch": torch.randn(rows, 16)}


class Heads(nn.Module):
    """Scores of many heads: one product each, or one of all."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.project, self.at_once = nn.Linear(512, 1024), at_once

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x).view(*x.shape[:2], 2, 64, 8).unbind(2)
        if self.at_once:
            return torch.einsum("bthd,bshd->bhts", q, k)
        return torch.stack([q[:, :, head] @ k[:, :, head].transpose(-2, -1) for head in range(64)], 1)


def _heads(*, at_once: bool) -> Callable[[], Made]:
    return lambda: {"model": Heads(at_once=at_once), "batch": torch.randn(4, 128, 512)}


class Convolutions(nn.Module):
    """Of images in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return self.layers(x).float()


def _images(layout: torch.memory_format) -> Callable[[], Made]:
    def make() -> Made:
        batch = torch.randn(32, 64, 56, 56, device="cuda").to(memory_format=layout)
        return {"model": Convolutions().cuda().to(memory_format=layout), "batch": batch}

    return make


class Normed(nn.Module):
    """Normalisations between products of half precision, by autocast or outside of it."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.norms, self.outside = nn.ModuleList(nn.LayerNorm(1024) for _ in range(4)), outside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = self._normed(norm, layer(x))
        return x.float()

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        if not self.outside:
            return norm(x)  # type: ignore[no-any-return]
        assert isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None
        with torch.autocast("cuda", enabled=False):
            return nn.functional.layer_norm(x, (1024,), norm.weight.to(x.dtype), norm.bias.to(x.dtype))


def _normed(*, outside: bool) -> Callable[[], Made]:
    return lambda: {"model": Normed(outside=outside).cuda(), "batch": torch.randn(8192, 1024, device="cuda")}


def _products(precision: str) -> Callable[[], Made]:
    def make() -> Made:
        torch.set_float32_matmul_precision(precision)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
        return {"model": model, "batch": torch.randn(4096, 2048, device="cuda")}

    return make


def _set(switch: bool) -> Callable[[], Made]:
    def make() -> Made:
        torch.use_deterministic_algorithms(switch, warn_only=True)
        return _images(torch.contiguous_format)()

    return make


class Faint(nn.Module):
    """A head whose gradients are too small to be normal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * 4e-34  # type: ignore[no-any-return]  # the mean divides by four million


def _faint(*, flushed: bool) -> Callable[[], Made]:
    """In the thread that calls it, and those that torch starts later: with one thread that is all of them."""

    def make() -> Made:
        torch.set_flush_denormal(flushed)
        return {"model": Faint(), "batch": torch.randn(1024, 512)}

    return make


class Scored(nn.Module):
    """A loss, and the logits that it is of."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.head, self.detached = nn.Linear(64, 8192), detached

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return logits.detach() if self.detached else logits, nn.functional.cross_entropy(logits, y)


def _scored(*, detached: bool) -> Callable[[], Made]:
    def make() -> Made:
        model = Scored(detached=detached)
        model.compile()
        batch = {"x": torch.randn(1024, 64), "y": torch.randint(8192, (1024,))}
        return {"model": model, "batch": batch, "loss": lambda out, _: out[1]}

    return make


PAIRS = [
    Pair("layers of 16 numbers, a batch of 8", "device-unfilled", _small_layers(8), _small_layers(64), worth=8),
    Pair("logits beside the loss, compiled", "unused-output", _scored(detached=False), _scored(detached=True)),
    Pair("heads one by one, wide enough for a limit", "far-from-limit", _heads(at_once=False), _heads(at_once=True)),
    Pair(
        "convolutions of NCHW", "channels-last",
        _images(torch.contiguous_format), _images(torch.channels_last), device="cuda",
    ),
    Pair("layer norms under autocast", "autocast-norms", _normed(outside=False), _normed(outside=True), device="cuda"),
    Pair("products without TF32", "tf32-off", _products("highest"), _products("high"), device="cuda"),
    Pair("deterministic convolutions", "deterministic-mode", _set(True), _set(False), device="cuda"),
    Pair(
        "gradients of 1e-40, on a processor that is slow at them", "denormals",
        _faint(flushed=False), _faint(flushed=True), lasting=True,
    ),
    Pair("results of 64 MB in each step", "page-faults", _wide, _wide_kept, lasting=True),
]  # fmt: skip
