"""Planted problems of torch's switches, the optimizer and number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnose.run_case import Twin


def during(setting: Callable[[], AbstractContextManager[Any]], batch: Any) -> Iterator[Any]:
    """Batches for as long as the run wants some, with a switch on until it lets go of them."""
    with setting():
        while True:
            yield batch


def stack(count: int = 8, width: int = 32) -> nn.Sequential:
    """Small layers, one after the other."""
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())])


class Clearing(torch.optim.SGD):
    """Clears the gradients after each step.

    Args:
        to_none: as ``set_to_none``.
    """

    def __init__(self, parameters: Any, *, to_none: bool) -> None:
        super().__init__(parameters, lr=1e-4)
        self.to_none = to_none

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.zero_grad(set_to_none=self.to_none)


class Repeated(nn.Module):
    """One layer, used several times under autocast."""

    def __init__(self, width: int = 256, times: int = 6, *, cache: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, width)
        self.times, self.cache = times, cache

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.cache):
            for _ in range(self.times):
                x = torch.tanh(self.layer(x))
        return x.float().mean()


class HalfAttention(nn.Module):
    """Attention written out in float16.

    Args:
        first: whether the queries are scaled before the product.
    """

    def __init__(self, width: int = 32, *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(width, 3 * width).half()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        if self.first:
            q = q * q.size(-1) ** -0.5
            scores = q @ k.transpose(-2, -1)
        else:
            scores = q @ k.transpose(-2, -1)
            scores = scores / q.size(-1) ** 0.5
        weights = F.softmax(scores.float(), dim=-1).half()
        return (weights @ v).float().mean()


class Masked(nn.Module):
    """Torch's attention.

    Args:
        mask: whether it is given one, which hides nothing.
    """

    def __init__(self, width: int = 64, *, mask: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.mask = nn.Linear(width, 3 * width), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.project(x).chunk(3, dim=-1))
        tokens = x.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool) if self.mask else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).mean()


class CastByHand(nn.Module):
    """A layer that casts its weight itself.

    Args:
        often: whether at each use.
    """

    def __init__(self, width: int = 256, *, often: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.often = nn.Parameter(torch.randn(width, width) / width**0.5), often

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        once = self.weight.to(x.dtype)
        for _ in range(6):
            x = torch.tanh(F.linear(x, self.weight.to(x.dtype) if self.often else once))
        return x.float().mean()


def _anomaly(on: bool) -> dict[str, Any]:
    batch = torch.ones(16, 32)
    if not on:
        return {"model": stack(), "batch": batch}
    return {"model": stack(), "batch": during(lambda: torch.autograd.set_detect_anomaly(True), batch)}


def _optimizer(width: int = 64, count: int = 20, **options: Any) -> dict[str, Any]:
    model = stack(count, width)
    return {
        "model": model,
        "batch": torch.ones(8, width),
        "optimizer": torch.optim.AdamW(model.parameters(), **options),
    }


def _clearing(to_none: bool) -> dict[str, Any]:
    model = stack(2, 512)
    return {"model": model, "batch": torch.ones(1, 512), "optimizer": Clearing(model.parameters(), to_none=to_none)}


def _casts(cache: bool) -> dict[str, Any]:
    return {"model": Repeated(cache=cache), "batch": torch.ones(8, 256)}


def _half(first: bool) -> dict[str, Any]:
    return {"model": HalfAttention(first=first), "batch": torch.ones(2, 48, 32, dtype=torch.float16)}


def _masked(mask: bool) -> dict[str, Any]:
    return {"model": Masked(mask=mask), "batch": torch.ones(2, 256, 64)}


def _cast(often: bool) -> dict[str, Any]:
    return {"model": CastByHand(often=often), "batch": torch.ones(8, 256)}


TWINS: list[Twin] = [
    Twin("anomaly mode left on", "anomaly-mode", lambda: _anomaly(True), lambda: _anomaly(False)),
    Twin("AdamW, not fused", "optimizer-unfused", _optimizer, lambda: _optimizer(fused=True)),
    Twin("gradients set to zero", "zero-grad-fills", lambda: _clearing(False), lambda: _clearing(True)),
    Twin("autocast without its cache", "autocast-casts", lambda: _casts(False), lambda: _casts(True)),
    Twin("weights cast by the code", "autocast-casts", lambda: _cast(True), lambda: _cast(False)),
    Twin("a mask that hides nothing", "attention-explicit-mask", lambda: _masked(True), lambda: _masked(False)),
    Twin(
        "float16 scores, scaled late",
        "float16-softmax",
        lambda: _half(False),
        lambda: _half(True),
        frozenset({"attention-by-hand"}),
    ),
]
